"""Training under kills: what is lost, how long it takes to go on, what a save costs, whether memory stays flat.

Every figure stands beside its target.

    python benchmarks/reliability.py --out runs/reliability            # 200 steps, 60 kills, 500 steps left alone
    python benchmarks/reliability.py --out runs/smoke --steps 10 --kills 3 --soak 20

All runs are `python -m envace_jax train --config configs/quickstart.py` with small batches, in processes of their own.
One run is left alone for `--soak` steps; its memory, threads and open files are watched.  Another, of `--steps` steps,
is killed `--kills` times at seeded moments, in turn by SIGKILL and SIGTERM, and started again by the same command
until it is done.  Both must hold the same parameters, bit for bit, after the same step.  Goodput is the time that the
undisturbed run took for those steps over the time the killed one took, with the kills as close as they are here and,
computed from the mean loss of a kill, with one every 120 seconds.  What a kill costs at the default interval of
checkpoints is computed from this machine's step and recovery times: half an interval is played again.

Bits are flipped, files cut and deleted in the run's last checkpoint, one fault at a time, and each has to be found.  At
last one of two processes is stopped (SIGSTOP), and the other has to name it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SMALL = {
    "learning.prompts_per_step": 4,
    "learning.group_size": 2,
    "learning.rows_per_microbatch": 4,
    "rollout.live_episodes": 8,
    "rollout.slots": 16,
    "evaluation.at_start": False,
    "evaluation.at_end": False,
    "metrics.tensorboard": False,
    "metrics.progress": False,
    "checkpoint.every": 1,  # a save costs a few percent of so small a step; a kill then loses one step at most
}
EVERY = 5  # steps between the checkpoints of the run that is left alone
PREEMPTED, LOST = 75, 76
HANG_TIMEOUT = 20.0  # seconds, of the run whose process is stopped
DAMAGES = 200


def start(folder: Path, variables: dict[str, str] | None = None, **changes: Any) -> subprocess.Popen:
    options = [f"--config.{k}={v}" for k, v in (SMALL | changes).items()]
    command = [sys.executable, "-m", "envace_jax", "train", "--config", "configs/quickstart.py"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"} | (variables or {})
    with log_of(folder).open("ab") as log:
        return subprocess.Popen(
            [*command, f"--config.run_dir={folder}", *options], cwd=ROOT, env=environment, stdout=log, stderr=log
        )


def log_of(folder: Path) -> Path:
    return folder.parent / f"{folder.name}.log"


def steps_done(folder: Path) -> int:
    """Last step in the metrics; a line that is being written does not count."""
    try:
        lines = (folder / "metrics.jsonl").read_text().splitlines()
    except OSError:
        return 0
    for line in reversed(lines):
        try:
            return int(json.loads(line)["step"])
        except ValueError:
            continue
    return 0


def resources(pid: int) -> tuple[float, int, int]:
    """Resident MiB, threads, open files of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    threads, files = (len(os.listdir(f"/proc/{pid}/{what}")) for what in ("task", "fd"))
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20, threads, files


def undisturbed(folder: Path, soak: int) -> dict[str, Any]:
    """The run that is left alone: when each step was done, and resources after the first quarter and at the end."""
    changes = {"learning.steps": soak, "checkpoint.every": EVERY, "checkpoint.keep": 10_000}
    process, seen, done_at = start(folder, **changes), [], {}
    began = time.monotonic()
    while process.poll() is None:
        step = steps_done(folder)
        done_at.setdefault(step, time.monotonic() - began)
        if step:
            seen.append((step, *resources(process.pid)))
        time.sleep(0.2)
    if process.returncode != 0:
        raise SystemExit(f"the undisturbed run failed with {process.returncode}: see {log_of(folder)}")
    early = [r for r in seen if soak // 4 <= r[0] < soak // 2] or seen[:1]
    late = [r for r in seen if r[0] >= soak - soak // 4 and r[0] < soak] or seen[-1:]  # the end draws a plot
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        "done_at": done_at,
        "rss_early": max(r[1] for r in early),
        "rss_late": max(r[1] for r in late),
        "threads": (max(r[2] for r in early), max(r[2] for r in late)),
        "files": (max(r[3] for r in early), max(r[3] for r in late)),
        "compilations": sum(r["compilations"] for r in records[2:]),
        "step_seconds": statistics.median(r["time/step"] for r in records[2:]),
    }


def disturbed(folder: Path, steps: int, kills: int, seed: int) -> dict[str, Any]:
    """The run that is killed: each start may do its share of the steps that are left, then the signal comes at a random
    moment."""
    rng, recovery, ends = random.Random(seed), [], []  # ends: status, seconds from the signal to the end
    began, killed_at = time.monotonic(), None
    while True:
        before = steps_done(folder)
        process, started = start(folder, **{"learning.steps": steps}), time.monotonic()
        # As many steps as leave some for the kills to come; near the end a kill comes before any new step is done.
        share = (steps - before) / max(kills - len(ends), 1)
        wanted = before + rng.randrange(0, int(1.5 * share) + 1) if len(ends) < kills else steps + 1
        moment, sent_at = rng.random() * 2.0, None
        while process.poll() is None:
            done = steps_done(folder)
            if done > before and killed_at is not None:
                recovery.append(time.monotonic() - killed_at)
                killed_at = None
            if done >= wanted and sent_at is None and time.monotonic() - started > 2.0:
                time.sleep(moment)
                process.send_signal((signal.SIGKILL, signal.SIGTERM)[len(ends) % 2])
                sent_at = time.monotonic()
            time.sleep(0.02)
        status = process.returncode
        if status == 0:
            break
        if sent_at is None or status not in (-signal.SIGKILL, -signal.SIGTERM, PREEMPTED):
            raise SystemExit(f"a start ended with {status} by itself: see {log_of(folder)}")
        ends.append((status, time.monotonic() - sent_at))
        killed_at = sent_at
    return {
        "seconds": time.monotonic() - began,
        "kills": len(ends),
        "recovery": recovery,
        "term_seconds": [s for status, s in ends if status == PREEMPTED],
        "term_early": sum(status == -signal.SIGTERM for status, _ in ends),
    }


def damages_found(folder: Path, seed: int) -> dict[str, int]:
    """How many of `DAMAGES` faults in the run's last checkpoint are found before its use, by kind."""
    from envace_jax.learning.checkpoint import Checkpoints

    checkpoints = Checkpoints(folder / "checkpoints", say=lambda _: None)
    step, rng = checkpoints.latest(), random.Random(seed)
    inside = sorted((folder / "checkpoints").glob(f"step_{step:08d}/**/*"))
    files = [p for p in inside if p.is_file() and p.stat().st_size]
    files.append(folder / "checkpoints" / f"step_{step:08d}.sha256")
    found = dict.fromkeys(("flips", "cuts", "deletions"), 0)
    for n in range(DAMAGES):
        kind, path = ("flips", "flips", "cuts", "deletions")[n % 4], rng.choice(files)
        data = path.read_bytes()
        at = rng.randrange(len(data))
        if kind == "deletions":
            path.unlink()
        elif kind == "cuts":
            path.write_bytes(data[:at])
        else:
            path.write_bytes(data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :])
        found[kind] += checkpoints.latest() != step
        path.write_bytes(data)
    if checkpoints.latest() != step:
        raise SystemExit(f"{folder}: a checkpoint that was given its files back is not whole")
    return found


def stalled(folder: Path) -> dict[str, Any]:
    """Two processes as one run; one is stopped once steps are done: how long until the other has named it and ended."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    together = {"ENVACE_COORDINATOR": f"127.0.0.1:{port}", "ENVACE_PROCESSES": "2"}
    changes = {"learning.steps": 10_000, "mesh.fsdp": 2, "mesh.hang_timeout": HANG_TIMEOUT}
    team = [start(folder, together | {"ENVACE_PROCESS": str(i)}, **changes) for i in range(2)]
    try:
        while steps_done(folder) < 2:
            if any(process.poll() is not None for process in team):
                return {"seconds": float("nan"), "named": False}  # ended by itself: the log says why
            time.sleep(0.05)
        team[1].send_signal(signal.SIGSTOP)
        began = time.monotonic()
        status = team[0].wait(600)
        return {
            "seconds": time.monotonic() - began,
            "named": status == LOST and "process 1 on" in log_of(folder).read_text(errors="replace"),
        }
    finally:
        for process in team:
            if process.poll() is None:
                process.kill()
                process.wait()


def same_parameters(one: Path, two: Path, step: int) -> bool:
    """Whether two runs' checkpoints of a step hold the same arrays, optimizer and all, bit for bit."""
    import jax
    import numpy as np

    from envace_jax.learning.checkpoint import Checkpoints
    from envace_jax.learning.step import UpdateConfig, make_update
    from envace_jax.model.qwen3 import init_params
    from envace_jax.model.spec import Qwen3Spec

    states = []
    for folder in (one, two):
        checkpoints = Checkpoints(folder / "checkpoints")
        spec = Qwen3Spec.from_hf_config(checkpoints.read_meta(step)["model"])
        like = {"policy": make_update(spec, UpdateConfig()).init(init_params(spec, jax.random.key(0)))}
        states.append(jax.tree.leaves(jax.device_get(checkpoints.restore(step, like))))
    return all(np.array_equal(a, b) for a, b in zip(*states, strict=True))


def same_records(one: Path, two: Path, steps: int) -> bool:
    """Whether both runs' metrics tell each step once, with the same losses."""
    losses = [
        [(r["step"], r["loss"]) for r in map(json.loads, (x / "metrics.jsonl").read_text().splitlines())]
        for x in (one, two)
    ]
    return losses[0][:steps] == losses[1][:steps] and [s for s, _ in losses[1]] == list(range(1, steps + 1))


def save_seconds(folder: Path, saves: int = 20) -> dict[str, float]:
    """How long a save of the run's last state holds training up, and how long until it is whole."""
    import jax

    from envace_jax.learning.checkpoint import Checkpoints
    from envace_jax.learning.step import UpdateConfig, make_update
    from envace_jax.model.qwen3 import init_params
    from envace_jax.model.spec import Qwen3Spec

    source = Checkpoints(folder / "checkpoints")
    spec = Qwen3Spec.from_hf_config(source.read_meta(source.latest())["model"])
    state = make_update(spec, UpdateConfig()).init(init_params(spec, jax.random.key(0)))
    target, held, whole = Checkpoints(folder.parent / "saves", keep=1), [], []
    for step in range(1, saves + 1):
        began = time.perf_counter()
        target.save(step, {"policy": state}, {"step": step})
        held.append(time.perf_counter() - began)
        target.wait()
        whole.append(time.perf_counter() - began)
    target.close()
    return {"held": statistics.median(held[1:]), "whole": statistics.median(whole[1:])}


def yes(value: bool) -> str:
    return "yes" if value else "NO"


def main() -> None:
    from envace_jax.config import default_config

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--soak", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.steps % EVERY or not args.steps <= args.soak:
        raise SystemExit(f"--steps: expected a multiple of {EVERY}, at most --soak")
    if (args.out / "alone").exists() or (args.out / "killed").exists():
        raise SystemExit(f"{args.out}: there are runs already; give an empty folder")
    args.out.mkdir(parents=True, exist_ok=True)
    alone, killed = (args.out.absolute() / name for name in ("alone", "killed"))
    a = undisturbed(alone, args.soak)
    k = disturbed(killed, args.steps, args.kills, args.seed)
    own = next(t for step, t in sorted(a["done_at"].items()) if step >= args.steps)
    saves = save_seconds(alone)
    lost = max(0.0, k["seconds"] - own) / max(k["kills"], 1)
    recovery, term = sorted(k["recovery"]) or [float("nan")], sorted(k["term_seconds"]) or [float("nan")]
    usual = statistics.median(recovery)
    interval = default_config().checkpoint.every
    found, stall = damages_found(alone, args.seed), stalled(args.out.absolute() / "two")
    rows = [
        ("kills survived, by the same command", "all", f"{k['kills']} of {args.kills}"),
        (
            "parameters and moments equal the undisturbed run's, bit for bit",
            "yes",
            yes(same_parameters(alone, killed, args.steps)),
        ),
        ("each step once in the metrics, same losses", "yes", yes(same_records(alone, killed, args.steps))),
        ("kill to next new step, median / worst", "10 s", f"{usual:.1f} s / {recovery[-1]:.1f} s"),
        ("lost by a kill, on average, with these checkpoints", "", f"{lost:.1f} s"),
        (
            f"lost by a kill at the default interval of {interval} steps: half of it and the recovery",
            "5 min",
            f"{interval / 2 * a['step_seconds'] + usual:.0f} s",
        ),
        ("goodput with these kills", "", f"{own / k['seconds']:.0%}"),
        ("goodput with one kill every 120 s, from that", "85%", f"{120 / (120 + lost):.0%}"),
        (
            f"SIGTERM to committed and out with status {PREEMPTED}, median / worst",
            "10 s",
            f"{statistics.median(term):.1f} s / {term[-1]:.1f} s of {len(k['term_seconds'])}",
        ),
        ("SIGTERM before the run could save (nothing new to lose)", "", k["term_early"]),
        ("a save holds training up", "50 ms", f"{saves['held'] * 1e3:.0f} ms"),
        ("a save is whole and compared after", "", f"{saves['whole'] * 1e3:.0f} ms"),
        (
            "faults in a checkpoint found: flips, cuts, deletions",
            f"{DAMAGES} of {DAMAGES}",
            f"{sum(found.values())} of {DAMAGES}: {', '.join(str(n) for n in found.values())}",
        ),
        (
            f"a stopped process of two is named (mesh.hang_timeout={HANG_TIMEOUT:.0f})",
            "30 s",
            f"{stall['seconds']:.1f} s" if stall["named"] else "no",
        ),
        (
            f"memory over {args.soak} steps, second to last quarter",
            "+5%",
            f"{a['rss_early']:.0f} to {a['rss_late']:.0f} MiB ({a['rss_late'] / a['rss_early'] - 1:+.1%})",
        ),
        (
            "threads, open files, second to last quarter",
            "flat",
            f"{' to '.join(map(str, a['threads']))}, {' to '.join(map(str, a['files']))}",
        ),
        ("programs compiled after the second step", "0", int(a["compilations"])),
        ("a step, median", "", f"{a['step_seconds']:.2f} s"),
    ]
    table = (f"| {name} | {target} | {value} |" for name, target, value in rows)
    text = "\n".join(["| what | target | result |", "|---|---|---|", *table])
    (args.out / "table.md").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
