"""Real text environments for replay: a terminal in a throw-away folder, and ScienceWorld where it can run."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import pty
import select
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from envace_jax.config import UserError
from envace_jax.datasets.records import Task

SCREEN_BYTES = 40_000
MAX_WAIT = 30.0
SEND_SECONDS = 1.0  # for typing, however short the wait
PROMPT = "sim$ "
CONTINUATION = "> "


class TerminalEnvironment:
    """Bash in a folder of its own that is deleted afterwards: keystrokes in, what the screen shows out.

    The shell runs without network (its own network namespace, where the system allows one; `isolated` says so), as an
    unprivileged user where we are root, with limits on time, memory and file size. That keeps accidents in; it is no
    wall against an attacker, so run tasks of unknown origin in a container.

    ``step("keys", {"keystrokes": text, "duration": seconds})``: an empty text waits, one without a newline stays typed.
    A fork replays the keystrokes in a new folder.
    """

    def __init__(self) -> None:
        self.folder: Path | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self.typed: list[dict[str, Any]] = []
        self.files: dict[str, str] = {}
        self.isolated = network_namespace_works()
        self._screen = -1

    def reset(self, task: Task) -> None:
        """A new folder with the task's files (``meta["initial_state"]["files"]``: name to text)."""
        state = task.meta.get("initial_state") or {}
        self.start(state.get("files") or {})

    def start(self, files: dict[str, str]) -> str:
        """Start the shell in a new folder that holds the files; what it shows at first."""
        self.close()
        self.files, self.typed = dict(files), []
        self.folder = Path(tempfile.mkdtemp(prefix="terminal-"))
        for name, text in self.files.items():
            target = (self.folder / name).resolve()
            if self.folder.resolve() not in target.parents:
                raise UserError(f"terminal task: file {name!r} lies outside of the folder")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
        command = ["bash", "--noprofile", "--norc", "-i"]
        if self.isolated:
            command = ["unshare", "-rn", *command]
        if os.geteuid() == 0 and shutil.which("setpriv"):
            command = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", *command]
            for path in (self.folder, *self.folder.rglob("*")):
                os.chown(path, 65534, 65534)
        # A shell that is not interactive drops PS1, so the prompts go in after the limits.
        limits = f"ulimit -t 60 -f 65536 -u 256 2>/dev/null; exec env PS1='{PROMPT}' PS2='{CONTINUATION}' \"$@\""
        self._screen, slave = pty.openpty()
        self.process = subprocess.Popen(
            ["bash", "-c", limits, "limits", *command],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd=self.folder,
            start_new_session=True,
            env={
                "PATH": "/usr/bin:/bin",
                "HOME": str(self.folder),
                "TERM": "dumb",
                "LC_ALL": "C.UTF-8",
                "HISTFILE": "/dev/null",
            },
        )
        os.close(slave)
        fcntl.fcntl(self._screen, fcntl.F_SETFL, os.O_NONBLOCK)
        shown = self._read(2.0, until_prompt=True)
        out = self._send("stty -echoctl; bind 'set enable-bracketed-paste off' 2>/dev/null\n", 2.0)
        self._read(2.0, until_prompt=True, out=out)
        return shown

    def step(self, name: str, arguments: dict[str, Any]) -> Any:
        """The new text on the screen, or ``{"error": ...}`` for a call that is none."""
        keystrokes, duration = arguments.get("keystrokes", ""), arguments.get("duration", 1.0)
        if name != "keys" or not isinstance(keystrokes, str) or isinstance(duration, bool):
            return {"error": "expected keys(keystrokes, duration)"}
        if not isinstance(duration, (int, float)) or not 0 <= duration <= MAX_WAIT:
            return {"error": f"duration: 0 to {MAX_WAIT:.0f} seconds"}
        if self.process is None or self.process.poll() is not None:
            return {"error": "the shell has ended"}
        self.typed.append({"keystrokes": keystrokes, "duration": duration})
        out = self._send(keystrokes, float(duration))
        return self._read(float(duration), until_prompt=keystrokes.endswith("\n"), out=out).replace("\r\n", "\n")

    def _send(self, text: str, seconds: float) -> bytes:
        """Types a text, and says what appeared meanwhile. A program that does not read takes no more than the terminal
        holds: what it has not taken within the time is lost."""
        data, out = text.encode("utf-8", "replace"), b""
        end = time.monotonic() + max(seconds, SEND_SECONDS)
        while data and time.monotonic() < end:
            # What is typed is echoed, so typing goes on only while the screen is read.
            ready, free, _ = select.select([self._screen], [self._screen], [], 0.05)
            try:
                if ready:
                    out = (out + os.read(self._screen, 65_536))[-4 * SCREEN_BYTES :]
                if free:
                    data = data[os.write(self._screen, data[:4_096]) :]
            except BlockingIOError:
                time.sleep(0.01)
            except OSError:  # the shell has ended
                break
        return out

    def _read(self, duration: float, until_prompt: bool, out: bytes = b"") -> str:
        """What appears within the time, after `out`; with a finished line, no longer than until the prompt is back."""
        end = time.monotonic() + duration
        while (left := end - time.monotonic()) > 0 or not out:
            ready, _, _ = select.select([self._screen], [], [], max(0.0, min(left, 0.05)))
            if ready:
                try:
                    chunk = os.read(self._screen, 65_536)
                except OSError:
                    break
                if not chunk:
                    break
                out = (out + chunk)[-4 * SCREEN_BYTES :]
                continue
            tail = out.decode("utf-8", "replace")
            if until_prompt and tail.endswith((PROMPT, "\n" + CONTINUATION)):
                break
            if left <= 0:
                break
        text = out.decode("utf-8", "replace")
        return (
            text if len(text) <= SCREEN_BYTES else text[: SCREEN_BYTES // 4] + "\n…\n" + text[-SCREEN_BYTES * 3 // 4 :]
        )

    def fork(self) -> TerminalEnvironment:
        """The same keystrokes in a new folder."""
        other = TerminalEnvironment()
        other.start(self.files)
        for arguments in self.typed:
            other.step("keys", arguments)
        return other

    def state_hash(self) -> str:
        """Names and contents of all files in the folder."""
        sha = hashlib.sha256()
        assert self.folder is not None
        for path in sorted(p for p in self.folder.rglob("*") if not p.is_symlink() and p.is_file()):
            data = path.read_bytes()[: 1 << 22]
            sha.update(f"{path.relative_to(self.folder)}\0{len(data)}\0".encode("utf-8", "surrogateescape") + data)
        return sha.hexdigest()

    def close(self) -> None:
        """End the shell with everything it started, and delete the folder."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            os.close(self._screen)
            self.process = None
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder = None

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()


def network_namespace_works() -> bool:
    """Whether an unprivileged network namespace can be made here."""
    if shutil.which("unshare") is None:
        return False
    return subprocess.run(["unshare", "-rn", "true"], capture_output=True, timeout=20).returncode == 0


class ScienceWorldEnvironment:
    """ScienceWorld (PyPI ``scienceworld``; needs Java): ``step("do", {"action": text})``; forks by replay.

    ``meta["simulation"]``: ``{"task": name, "variation": number}``.
    """

    def __init__(self) -> None:
        self.world: Any = None
        self.meta: dict[str, Any] = {}
        self.done_actions: list[str] = []
        self.score = 0

    def reset(self, task: Task) -> None:
        """Load the task's variation.

        Raises:
            UserError: the package or Java is missing.
        """
        problem = scienceworld_missing()
        if problem:
            raise UserError(problem)
        self.meta = dict(task.meta.get("simulation") or {})
        self.close()
        self.world = _simulator()
        self.world.load(self.meta["task"], int(self.meta.get("variation", 0)), "easy")
        self.world.reset()
        self.done_actions, self.score = [], 0

    def step(self, name: str, arguments: dict[str, Any]) -> Any:
        """What the world answers to the action's text."""
        action = arguments.get("action")
        if name != "do" or not isinstance(action, str):
            return {"error": "expected do(action)"}
        self.done_actions.append(action)
        observation, _, _, info = self.world.step(action)
        self.score = int(info.get("score", 0))
        return observation

    def fork(self) -> ScienceWorldEnvironment:
        other = ScienceWorldEnvironment()
        other.reset(_as_task(self.meta))
        for action in self.done_actions:
            other.step("do", {"action": action})
        return other

    def state_hash(self) -> str:
        return hashlib.sha256(f"{self.score}\n{self.world.look()}\n{self.world.inventory()}".encode()).hexdigest()

    def close(self) -> None:
        """Leave the simulator to the next episode; a few are kept, since each is a Java process that takes seconds."""
        if self.world is not None and len(_idle) < MAX_IDLE:
            _idle.append(self.world)
        elif self.world is not None:
            self.world.close()
        self.world = None

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the simulator may be gone before us
            self.close()


MAX_IDLE = 4
_idle: list[Any] = []


def _simulator() -> Any:
    """An idle simulator, or a new one."""
    from scienceworld import ScienceWorldEnv

    with contextlib.suppress(IndexError):
        return _idle.pop()
    return ScienceWorldEnv("", envStepLimit=100)


def scienceworld_missing() -> str:
    """Why ScienceWorld cannot run here, or an empty text."""
    try:
        import scienceworld  # noqa: F401
    except ImportError:
        return "ScienceWorld: the package `scienceworld` is not installed (pip install scienceworld)"
    return "" if shutil.which("java") else "ScienceWorld: no Java found (install a JRE, version 8 or later)"


def _as_task(meta: dict[str, Any]) -> Task:
    return Task("fork", "scienceworld", (), (), (), {"simulation": meta})
