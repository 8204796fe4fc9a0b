"""Looking inside a run: profiles of chosen steps, how busy the devices were, memory, and the page that repeats it."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from envace_jax.config import UserError
from envace_jax.faults import point
from envace_jax.learning.metrics import clean
from envace_jax.planning.chips import CHIPS
from envace_jax.planning.formulas import causal_pairs, forward_flops, train_flops

_STEPS = re.compile(r"(\d+)(?:-(\d+))?$")


def profiled(text: str) -> range:
    """Steps of `3` or `3-5` (numbered from 1); none for an empty text."""
    if not text:
        return range(0)
    found = _STEPS.match(text)
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= first <= last:
        raise UserError(f"profile_steps='{text}': expected a step or a range such as 3 or 3-5")
    return range(first, last + 1)


@contextlib.contextmanager
def profiling(steps: range, step: int, folder: Path) -> Iterator[None]:
    """A jax profile of one step, where it is one of `steps`: `folder/profile/step_…`, for TensorBoard or xprof."""
    if step not in steps:
        yield
        return
    import jax

    with (
        jax.profiler.trace(str(folder / "profile" / f"step_{step:08d}")),
        jax.profiler.StepTraceAnnotation("train", step_num=step),
    ):
        yield


def peak_flops(kind: str) -> float | None:
    """bfloat16 FLOPs a second of a device by its kind (`TPU v5p`, `NVIDIA H100 80GB HBM3`); None where unknown."""
    name = kind.lower().replace("lite", "e").replace(" ", "")
    for chip in sorted(CHIPS.values(), key=lambda c: -len(c.name)):
        if chip.name in name:
            return chip.flops
    return None


def utilisation(
    spec: Any,
    rows: Sequence[tuple[int, int]],
    prompt_and_output: tuple[float, float],
    seconds: Mapping[str, float],
    devices: int,
    peak: float | None,
) -> dict[str, float]:
    """Model FLOPs and their share of the peak, by phase.

    Args:
        rows: (tokens, predictions) of every trained row.
        prompt_and_output: tokens prefilled and tokens sampled by all engines.
        seconds: wall time of `learn` and `rollout`.
        devices: how many share the work.
        peak: of one device; None leaves the shares out.
    """
    tokens = float(sum(n for n, _ in rows))
    pairs = float(sum(causal_pairs(n) for n, _ in rows))
    predictions = float(sum(k for _, k in rows))
    mean = tokens / max(len(rows), 1)
    prefilled, sampled = prompt_and_output
    # Attention of what was sampled reaches over half a row on average.
    work = {
        "learn": train_flops(spec, tokens, pairs, predictions),
        "rollout": forward_flops(spec, prefilled + sampled, (prefilled + sampled) * mean / 2, sampled),
    }
    out = {f"model_tflops/{name}": flops / 1e12 for name, flops in work.items()}
    if peak is not None:
        for name, flops in work.items():
            out[f"mfu/{name}"] = flops / max(seconds[name], 1e-9) / (peak * devices)
    return out


def memory() -> dict[str, float]:
    """High-water marks: of this process on the host, and of its fullest device where the backend counts."""
    import resource

    import jax

    unit = 1 if sys.platform == "darwin" else 1024
    out = {"memory/host_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30}
    peaks = [(d.memory_stats() or {}).get("peak_bytes_in_use", 0) for d in jax.local_devices()]
    if max(peaks, default=0):
        out["memory/device_gib"] = max(peaks) / 2**30
    return out


class CompileLog:
    """`compile.jsonl`: every program that a start compiled, by its owner, with its seconds, after so many steps."""

    def __init__(self, path: Path):
        self.path = path
        self._written: dict[str, int] = {}

    def note(self, step: int, compiled: Mapping[str, Sequence[tuple[str, float]]]) -> None:
        """Appends what is new. `compiled`: (program, seconds) by owner, in the order in which they were compiled."""
        lines = []
        for owner, programs in compiled.items():
            for name, seconds in programs[self._written.get(owner, 0) :]:
                lines.append(json.dumps({"step": step, "owner": owner, "program": name, "seconds": round(seconds, 3)}))
            self._written[owner] = len(programs)
        if lines:
            point("write")
            with self.path.open("a") as file:
                file.write("".join(f"{line}\n" for line in lines))


def telling(trajectories: Sequence[Any]) -> dict[str, Any]:
    """The best and the worst trajectory of the first group with spread; without one the first trajectory alone."""
    for group in dict.fromkeys(t.group for t in trajectories):
        scored = [t for t in trajectories if t.group == group and t.reward is not None]
        if len({t.reward for t in scored}) > 1:
            return {"best": max(scored, key=lambda t: t.reward), "worst": min(scored, key=lambda t: t.reward)}
    return {"first": trajectories[0]} if trajectories else {}


def trajectory_text(trajectory: Any, limit: int = 20_000) -> str:
    """A trajectory for TensorBoard, at most `limit` characters: a block that Markdown leaves alone, without control
    characters."""
    reward = "none" if trajectory.reward is None else f"{trajectory.reward:.3f}"
    parts = [f"task {trajectory.task_id}, member {trajectory.member}: reward {reward}, end {trajectory.end_reason}"]
    for turn in trajectory.transcript:
        parts += ["[user]", turn.user]
        for step in turn.steps:
            parts += ["[act]", step.output.raw]
            for observation in step.observations:
                parts += [f"[{observation.error_code or observation.source}]", observation.text]
    text = "\n".join(parts)
    lines = [f"    {clean(line, limit)}" for line in text[:limit].split("\n")]
    return "\n".join(lines + ["    …"] * (len(text) > limit))


def reproduce_page(values: Mapping[str, Any], starts: Sequence[Mapping[str, Any]]) -> str:
    """`REPRODUCE.md`: the command, where the code stood, versions, devices, and every value of the configuration."""
    first = starts[0]
    git, command = first["git"], first["command"]
    words = ["python", "-m", "envace_jax", *command[1:]]
    lines = [
        f"# Repeating {Path(str(values.get('run_dir', ''))).name}",
        "",
        "```sh",
        f"git checkout {git['commit'] or 'UNKNOWN  # the run was not started from a git checkout'}",
        " ".join(shlex.quote(word) for word in words),
        "```",
        "",
    ]
    if git["changed_files"]:
        lines += [f"{git['changed_files']} files differed from that commit when the run was started.", ""]
    lines += [
        f"- Python {first['python']}, " + ", ".join(f"{name} {version}" for name, version in first["packages"].items()),
        f"- {first['device_count']} devices ({', '.join(first['devices'])}) of {first['processes']} process(es), "
        f"{first['platform']}",
        f"- mesh: {starts[-1]['mesh']}",
        f"- seed {values['seed']}; the data's fingerprint is in `data.json`",
        "",
        "On one machine with the same devices and versions the parameters come out bit for bit; other devices, "
        "versions or meshes round differently.",
        "",
        "## Starts",
        "",
        "| time | hosts | processes | devices | mesh | commit |",
        "|---|---|---|---|---|---|",
    ]
    for s in starts:
        hosts, mesh, commit = ", ".join(s.get("hosts", ())), _cell(s.get("mesh", "")), s["git"]["commit"][:12]
        lines.append(f"| {s['time']} | {hosts} | {s['processes']} | {s['device_count']} | {mesh} | {commit} |")
    lines += ["", "## Configuration", "", "| key | value |", "|---|---|"]
    lines += [f"| `{name}` | `{_cell(value)}` |" for name, value in values.items()]
    return "\n".join(lines) + "\n"


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("`", "'").replace("\n", " ")
