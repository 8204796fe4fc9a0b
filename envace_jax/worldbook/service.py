"""A worldbook as an environment: reset, step and fork, at the terminal and over HTTP."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from envace_jax.config import UserError
from envace_jax.datasets.action_text import text_action
from envace_jax.datasets.records import Task
from envace_jax.datasets.traces import task_group
from envace_jax.text.transcript import canonical_json
from envace_jax.worldbook.harness import Harness, StepResult
from envace_jax.worldbook.state import StateError
from envace_jax.worldbook.workspace import Session, open_session, summarize_state

UNANSWERED = "NO_WORLDBOOK_ANSWER"
MAX_BODY = 1 << 20
MAX_SESSIONS = 10_000
READ_SECONDS = 60.0


class WorldbookEnvironment:
    """An episode in a worldbook behind the interface of real environments (`envace_jax.environments.Environment`).

    A call that nothing answers gets ``{"error": "NO_WORLDBOOK_ANSWER", ...}``: said, never made up.
    """

    def __init__(self, harness: Harness, session: Session | None = None):
        self.harness = harness
        self.session = session if session is not None else open_session()
        self.last: StepResult | None = None

    def reset(self, task: Task) -> None:
        """Open the task's episode: its explicit initial state where it has one, its group left out of retrieval."""
        meta = task.meta
        instruction = task.user_turns[0] if task.user_turns else ""
        self.session = open_session(meta.get("initial_state"), group=task_group(task), instruction=instruction)
        self.last = None

    def step(self, name: str, arguments: dict[str, Any]) -> Any:
        """The JSON value of the answer (its text, where it is not JSON)."""
        self.session, self.last = self.harness.step(self.session, name, arguments)
        if self.last.source == "none":
            return {"error": UNANSWERED, "cause": self.last.cause or self.last.rejected}
        return self.last.value

    def fork(self) -> WorldbookEnvironment:
        """An environment that goes its own way from here; costs nothing."""
        return WorldbookEnvironment(self.harness, self.session.fork())

    def state_hash(self) -> str:
        return self.session.state.digest()


def simulate(
    harness: Harness,
    lines: Iterable[str],
    show: Callable[[str], None],
    initial_state: dict[str, Any] | None = None,
    verbose: bool = False,
) -> Session:
    """A session at the terminal: one action a line, as JSON or ``name key=value``; ``:state``, ``:actions``,
    ``:memory``, ``:fork``, ``:back`` (to the last fork) and ``:quit`` are commands."""
    session = open_session(initial_state)
    forks: list[Session] = []
    for line in lines:
        text = line.strip()
        if not text:
            continue
        if text in (":quit", ":q"):
            break
        if text == ":state":
            show(summarize_state(session.state))
        elif text == ":actions":
            for action in harness.worldbook.actions:
                arguments = ", ".join(f"{n}: {a.type}" for n, a in action.arguments.items())
                show(f"{action.name}({arguments})  {action.description}")
        elif text == ":memory":
            for item in session.memory.recent(20):
                show(f"{item.turn} {item.action} {canonical_json(item.arguments)} → {item.observation[:200]}")
        elif text == ":fork":
            forks.append(session.fork())
            show(f"fork {len(forks)} kept")
        elif text == ":back":
            session = forks.pop() if forks else session
            show(f"turn {session.turn}")
        elif text.startswith(":"):
            show("commands: :state :actions :memory :fork :back :quit")
        else:
            asked = text_action(text)
            session, result = harness.step(session, asked["type"], asked["arguments"])
            origin = result.source + (f" {result.rule_id}" if result.rule_id else "")
            show(result.text if result.source != "none" else f"(no answer: {result.cause or result.rejected})")
            if verbose:
                show(f"  [{origin}; outcome {result.outcome}]")
    return session


class _Slot:
    """A session that is served, with the lock that keeps its steps in order."""

    __slots__ = ("lock", "session")

    def __init__(self, session: Session):
        self.session = session
        self.lock = threading.Lock()


class WorldbookService:
    """The environment over HTTP, on the loopback interface unless told otherwise.

    POST /reset {"initial_state"?, "group"?, "instruction"?} → {"session"}; POST /step {"session", "name",
    "arguments"} → {"observation", "source", "outcome"}; POST /fork {"session"} → {"session"}; POST /close {"session"};
    GET /actions; GET /health. Steps of one session come one after the other, those of others do not wait for them.
    Sessions beyond 10,000 push out the one that has been idle for longest.
    """

    def __init__(self, harness: Harness, host: str = "127.0.0.1", port: int = 0):
        self.harness = harness
        self.sessions: OrderedDict[str, _Slot] = OrderedDict()
        self._count = 0
        self._lock = threading.Lock()
        service = self

        class Handler(BaseHTTPRequestHandler):
            timeout = READ_SECONDS  # a client that sends nothing holds no thread for ever

            def do_POST(self) -> None:
                service._handle(self, self._body())

            def do_GET(self) -> None:
                service._handle(self, {})

            def _body(self) -> Any:
                try:
                    length = int(self.headers.get("Content-Length") or 0)
                    if not 0 <= length <= MAX_BODY:
                        return None
                    return json.loads(self.rfile.read(length) or b"{}")
                except (ValueError, RecursionError):
                    return None

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer((host, port), Handler)

    @property
    def address(self) -> str:
        host, port = self.server.server_address[:2]
        return f"http://{host!s}:{port}"

    def start(self) -> None:
        """Serve in a background thread until `stop`."""
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def serve(self) -> None:
        """Serve until interrupted."""
        self.server.serve_forever()

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def _handle(self, handler: BaseHTTPRequestHandler, body: Any) -> None:
        if not isinstance(body, dict):
            status, answer = 400, {"error": "expected a JSON object of at most 1 MiB"}
        else:
            try:
                status, answer = 200, self._answer(handler.path, body)
            except KeyError as error:
                status, answer = 404, {"error": f"not found: {str(error)[:100]}"}
            except (UserError, StateError, TypeError, ValueError, RecursionError) as error:
                status, answer = 400, {"error": str(error)[:300]}
            except Exception as error:  # one request fails, with a word to whoever made it
                status, answer = 500, {"error": f"{type(error).__name__}: {error}"[:300]}
        data = canonical_json(answer).encode()
        handler.send_response(status)
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)

    def _answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path == "/health":
            return {"ok": True, "digest": self.harness.worldbook.digest, "sessions": len(self.sessions)}
        if path == "/actions":
            return {"actions": [a.name for a in self.harness.worldbook.actions]}
        if path == "/reset":
            state = body.get("initial_state")
            group, instruction = (str(body.get(name) or "") for name in ("group", "instruction"))
            return {"session": self._keep(open_session(state, group=group, instruction=instruction))}
        if path not in ("/step", "/fork", "/close"):
            raise KeyError(path)
        with self._lock:
            key = str(body.get("session"))
            slot = self.sessions[key]
            self.sessions.move_to_end(key)
            if path == "/close":
                del self.sessions[key]
                return {"closed": key}
        if path == "/fork":
            return {"session": self._keep(slot.session.fork())}
        arguments = body.get("arguments", {})
        if not isinstance(body.get("name"), str) or not isinstance(arguments, dict):
            raise ValueError("expected name and arguments")
        canonical_json(arguments)  # refuses NaN and infinity, which would stay in the session's memory
        with slot.lock:
            session, result = self.harness.step(slot.session, body["name"], arguments)
            slot.session = session
        return {
            "observation": result.text,
            "source": result.source,
            "outcome": result.outcome,
            "cause": result.cause,
            "turn": session.turn,
        }

    def _keep(self, session: Session) -> str:
        with self._lock:
            self._count += 1
            key = f"s{self._count}"
            self.sessions[key] = _Slot(session)
            while len(self.sessions) > MAX_SESSIONS:
                self.sessions.popitem(last=False)
        return key
