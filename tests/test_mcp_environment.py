"""A real MCP server as the environment: the official client talks to a small server over a pipe."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from envace_jax.config import UserError
from envace_jax.environments import is_rejection
from envace_jax.mcp_environment import McpEnvironment, McpServer

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


def test_what_cannot_be_reached_is_said():
    pytest.importorskip("mcp", reason="the extra [mcp] is not installed")
    with pytest.raises(UserError, match="MCP server"):
        McpEnvironment(McpServer.read("/no/such/program")).reset()
    with pytest.raises(UserError, match="expected a command"):
        McpServer.read("")
    with pytest.raises(UserError, match="cannot be forked"):
        McpEnvironment(McpServer(url="http://127.0.0.1:1/mcp")).fork()
