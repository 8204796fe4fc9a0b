"""A real MCP server as the environment: the official client talks to a small server over a pipe."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from envace_jax.config import UserError
from envace_jax.datasets.records import Task
from envace_jax.environments import is_rejection
from envace_jax.mcp_environment import McpEnvironment, McpServer
from envace_jax.rehearsal.flow import Voice, run_flows
from envace_jax.test_time.chat import Talk
from envace_jax.test_time.commit import Committed
from envace_jax.test_time.plan import Plan
from envace_jax.text.chat import ChatFormat
from envace_jax.text.tokenizer import load_tokenizer
from envace_jax.text.transcript import Message
from tests.test_time.conftest import CFG, TOKENIZER, Policy, answer, call

SERVER = f"{shlex.quote(sys.executable)} {shlex.quote(str(Path(__file__).with_name('mcp_desk.py')))}"


def test_a_server_steps_forks_and_tells_its_state():
    pytest.importorskip("mcp", reason="the extra [mcp] is not installed")
    server = McpServer(McpServer.read(SERVER).command, state_tool="dump", seconds=60)
    here = McpEnvironment(server)
    here.reset()
    try:
        assert [tool["function"]["name"] for tool in here.tools] == ["add", "read"]
        assert here.tools[0]["function"]["parameters"]["required"] == ["n"]
        before = here.state_hash()
        assert here.step("add", {"n": 3}) == {"counter": 3}
        assert here.state_hash() != before
        refused = here.step("add", {"n": 1000})
        assert refused == {"error": "too much at once"} and is_rejection("mcp", refused)
        assert "not found" in here.step("dump", {})["error"]  # not offered
        fork = here.fork()
        try:
            assert fork.step("read", {}) == {"counter": 3} and fork.state_hash() == here.state_hash()
            fork.step("add", {"n": 1})
            assert here.step("read", {}) == {"counter": 3}
        finally:
            fork.close()
        here.reset()
        assert here.step("read", {}) == {"counter": 0}
    finally:
        here.close()


def test_a_rehearsal_over_mcp_reaches_the_server_in_the_committed_run_alone():
    pytest.importorskip("mcp", reason="the extra [mcp] is not installed")
    chat = ChatFormat(load_tokenizer(TOKENIZER), thinking=False, tool_docs="none")
    environment = McpEnvironment(McpServer(McpServer.read(SERVER).command, state_tool="dump", seconds=60))
    environment.reset()
    try:
        task = Task("mcp", "mcp", (Message("user", "Add 3."),), environment.tools, ())
        policy = Policy(
            chat,
            act=lambda text, key: "Done." if "<tool_response>" in text else call("add", n=3),
            rehearse=lambda text, key: answer({"counter": 7}),
            remember=lambda text, key: "add 3 once",
        )
        method = Committed(chat, replace(CFG, checks=("format",)), CFG, Plan("parallel", 2), make=lambda t: environment)
        ((_, (trajectory, counted)),) = run_flows([("only", method(task, Voice((0,))))], policy.engine)
        step, last = trajectory.transcript[0].steps
        assert (step.observations[0].text, step.observations[0].source) == ('{"counter": 3}', "real")
        assert last.output.reply == "Done." and counted["memories"] == ["add 3 once"]
        assert len(policy.texts("rehearse")) == 2  # both imagined their own answer
        assert environment.step("read", {}) == {"counter": 3}
        talk = Talk(task, policy.engine, chat, CFG, real=True, environment=environment)
        assert '  <- {"counter": 6}  [real]' in talk.say("Add 3.")  # as `chat --mcp` talks to it
    finally:
        environment.close()


def test_what_cannot_be_reached_is_said():
    pytest.importorskip("mcp", reason="the extra [mcp] is not installed")
    with pytest.raises(UserError, match="MCP server"):
        McpEnvironment(McpServer.read("/no/such/program")).reset()
    with pytest.raises(UserError, match="expected a command"):
        McpServer.read("")
    with pytest.raises(UserError, match="cannot be forked"):
        McpEnvironment(McpServer(url="http://127.0.0.1:1/mcp")).fork()
