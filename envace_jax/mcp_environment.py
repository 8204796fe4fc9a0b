"""A running MCP server as a real environment: its tools are the task's tools, its answers the observations.

The server is named by whoever runs the program (a command or a URL), never by a task: a command from a data file would
be run as it stands. Needs the package ``mcp`` (an extra: ``pip install 'envace_jax[mcp]'``).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import shlex
import threading
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from envace_jax.config import UserError
from envace_jax.datasets.records import Task
from envace_jax.text.transcript import canonical_json, clean_text

MAX_TEXT = 200_000


@dataclass(frozen=True)
class McpServer:
    """How a server is reached: a command that speaks over its standard input and output, or a URL (streamable HTTP).

    Attributes:
        state_tool: a tool without arguments that tells the server's whole state; it is not offered to the policy.
        seconds: how long one call may take.
    """

    command: tuple[str, ...] = ()
    url: str = ""
    env: dict[str, str] = field(default_factory=dict)
    state_tool: str = ""
    seconds: float = 60.0

    @staticmethod
    def read(text: str) -> McpServer:
        """From a command line or an http(s) address."""
        if text.startswith(("http://", "https://")):
            return McpServer(url=text)
        command = tuple(shlex.split(text))
        if not command:
            raise UserError("MCP server: expected a command or an http(s) address")
        return McpServer(command)


class McpEnvironment:
    """One session with a server. `reset` starts it anew, so that a command begins in its initial state.

    A fork starts a second server and makes the same calls again: it is true only of servers that answer alike. A server
    at a URL keeps its own state between sessions, so it is neither reset nor forked.
    """

    def __init__(self, server: McpServer) -> None:
        self.server = server
        self.tools: tuple[dict[str, Any], ...] = ()
        self.made: list[tuple[str, dict[str, Any]]] = []
        self._session: _Session | None = None

    def reset(self, task: Task | None = None) -> None:
        """Starts the server (or the session), and reads its tools.

        Raises:
            UserError: the package is missing, or the server does not answer.
        """
        self.close()
        self._session = _Session(self.server)
        self.made = []
        self.tools = tuple(tool for tool in self._session.tools if tool["function"]["name"] != self.server.state_tool)

    def step(self, name: str, arguments: dict[str, Any]) -> Any:
        assert self._session is not None, "reset comes first"
        if name not in {tool["function"]["name"] for tool in self.tools}:
            return {"error": f"Tool '{name}' not found."}
        self.made.append((name, arguments))
        return self._session.call(name, arguments)

    def fork(self) -> McpEnvironment:
        if self.server.url:
            raise UserError("an MCP server at a URL cannot be forked: its state is its own")
        other = McpEnvironment(self.server)
        other.reset()
        for name, arguments in self.made:
            other.step(name, arguments)
        return other

    def state_hash(self) -> str:
        """Digest of what the state tool tells; without one, of the calls made (two orders of one state then differ)."""
        assert self._session is not None, "reset comes first"
        told = self._session.call(self.server.state_tool, {}) if self.server.state_tool else self.made
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None

    def __del__(self) -> None:
        self.close()


class _Session:
    """The client on a thread of its own with its event loop; calls wait for it."""

    def __init__(self, server: McpServer) -> None:
        try:
            import mcp
        except ImportError:
            raise UserError("an MCP environment needs the package `mcp` (pip install 'envace_jax[mcp]')") from None
        self._seconds = server.seconds
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="mcp", daemon=True)
        self._thread.start()
        target: Any = server.url
        if not target:
            head, *rest = server.command
            target = mcp.StdioServerParameters(command=head, args=rest, env=dict(server.env) or None)
        self._stop: asyncio.Event | None = None
        self._client: Any = None
        opened: Any = self._run(self._make_future())
        self._serving = asyncio.run_coroutine_threadsafe(self._serve(mcp.Client(target), opened), self._loop)
        try:
            self.tools = self._run(asyncio.wait_for(opened, self._seconds))
        except BaseException as error:  # whatever a server can do wrong at its start
            self.close()
            if not isinstance(error, Exception):
                raise
            raise UserError(
                f"MCP server {server.url or server.command[0]!r}: {type(error).__name__}: {error}"
            ) from None

    async def _make_future(self) -> Any:
        return self._loop.create_future()

    async def _serve(self, client: Any, opened: Any) -> None:
        """Opens and closes the client in one task, as its cancel scopes demand."""
        self._stop = asyncio.Event()
        try:
            async with client:
                self._client = client
                tools, cursor = [], None
                while True:
                    page = await client.list_tools(cursor=cursor)
                    tools += [_tool(tool) for tool in page.tools]
                    cursor = page.next_cursor
                    if cursor is None:
                        break
                opened.set_result(tuple(tools))
                await self._stop.wait()
        except BaseException as error:
            if not opened.done():
                opened.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))
            if not isinstance(error, Exception):
                raise

    def call(self, name: str, arguments: dict[str, Any]) -> Any:
        """The JSON value of a call; what goes wrong is an error value."""
        try:
            result = self._run(asyncio.wait_for(self._client.call_tool(name, arguments), self._seconds))
        except TimeoutError:
            return {"error": f"no answer within {self._seconds:g} seconds"}
        except Exception as error:  # protocol errors, a server that died
            return {"error": f"{type(error).__name__}: {error}"[:500]}
        return _value(result)

    def close(self) -> None:
        if not self._loop.is_running():
            return
        if self._stop is not None:
            self._loop.call_soon_threadsafe(self._stop.set)
            try:
                self._serving.result(timeout=10)
            except Exception:  # it ends either way
                self._serving.cancel()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


def _tool(tool: Any) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
    return {"type": "function", "function": function}


def _value(result: Any) -> Any:
    """Structured content where there is some, else the text, read as JSON where it is JSON."""
    texts = [getattr(part, "text", f"({part.type} content)") for part in result.content]
    text = clean_text("\n".join(texts))[:MAX_TEXT]
    if result.is_error:
        return {"error": text or "the tool failed"}
    value = result.structured_content
    if value is None:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            value = text
    elif isinstance(value, dict) and list(value) == ["result"]:
        value = value["result"]  # how servers wrap what is no object
    try:
        return json.loads(canonical_json(value))
    except (TypeError, ValueError, RecursionError):
        return text
