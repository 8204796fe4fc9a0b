"""Episodes of the quickstart's own model for `rollout.py`: two kinds of control, and guessing ahead."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

Facts = dict[str, dict[str, float]]


class Quickstart:
    """The quickstart's model, tasks and configuration, in `stream` context."""

    def __init__(self, n_tasks: int, group: int, slots: int) -> None:
        from envace_jax.build import chat_format, load_model
        from envace_jax.config_file import read_config
        from envace_jax.datasets.sources import load_tasks

        self.cfg = read_config(str(Path(__file__).parents[1] / "configs" / "quickstart.py"))
        self.cfg.rollout.context, self.cfg.rollout.slots = "stream", slots
        self.tasks = load_tasks(self.cfg.data)[0][:n_tasks]
        self.group, self.slots = group, slots
        self.chat = chat_format(self.cfg)
        self.spec, self.params = load_model(self.cfg, self.chat, None)

    def engine(self, draft: int = 0) -> Any:
        """A warm engine that guesses `draft` tokens ahead."""
        from envace_jax.build import make_engine

        self.cfg.rollout.draft = draft
        engine = make_engine(self.cfg, self.spec, self.params)
        engine.warm_up()
        return engine

    def play(self, engine: Any, control: str) -> tuple[list, dict[str, float]]:
        """The sampled ids of every trajectory in order, and what was measured."""
        from envace_jax.rehearsal.rollout import rollout
        from envace_jax.rehearsal.settings import RolloutConfig
        from envace_jax.rewards.judge import RuleJudge

        before, timings = engine.stats(), {}
        played = rollout(
            self.tasks,
            engine=engine,
            chat=self.chat,
            cfg=dataclasses.replace(RolloutConfig.from_config(self.cfg), control=control),
            judge=RuleJudge(),
            group_size=self.group,
            timings=timings,
        )
        trajectories = sorted(played, key=lambda t: (t.group, t.member))
        gained = {name: value - before[name] for name, value in engine.stats().items()}
        tokens, wall = sum(len(s.ids) for t in trajectories for s in t.segments), timings["wall"]
        return [[s.ids for s in t.segments] for t in trajectories], {
            "seconds": wall,
            "tokens": tokens,
            "tokens_per_second": tokens / wall,
            "occupancy": gained["tokens_sampled"] / max(1, gained["slot_iterations"]),
            "host_share": 1 - gained["seconds_waiting"] / wall,
            "prefilled": gained["tokens_prefilled"],
            "dropped": gained["device_tokens_dropped"],
            "handed_over": gained["device_handed_over"],
            "diverged": gained["device_diverged"],
            "guessed": gained["tokens_drafted"],
            "came_true": gained["tokens_guessed_right"] / max(1, gained["tokens_drafted"]),
            "compiled": gained["programs_compiled_after_warm_up"],
        }

    def report(self, ids: dict[str, list], facts: Facts) -> Facts:
        """Prints both sides, and how many trajectories are equal."""
        one, other = ids.values()
        equal = sum(a == b for a, b in zip(one, other, strict=True))
        print(f"\n{len(self.tasks)} tasks x {self.group}, {self.slots} lanes; ", end="")
        print(f"{equal} of {len(one)} trajectories equal id for id")
        for name, row in facts.items():
            print(f"{name:7s}" + ", ".join(f"{key} {value:.4g}" for key, value in row.items()))
        return facts


def controls(n_tasks: int, group: int, slots: int) -> Facts:
    """Host and device control in turn, twice: the second time is measured."""
    from envace_jax.rehearsal.rollout import warm_up_control
    from envace_jax.rehearsal.settings import RolloutConfig

    start = Quickstart(n_tasks, group, slots)
    engine = start.engine()
    warm_up_control(engine, dataclasses.replace(RolloutConfig.from_config(start.cfg), control="device"))
    facts: Facts = {}
    ids: dict[str, list] = {}
    for control in ("host", "device") * 2:
        ids[control], facts[control] = start.play(engine, control)
    return start.report(ids, facts)


def drafts(n_tasks: int, group: int, slots: int, draft: int) -> Facts:
    """Without and with guesses in turn, twice: the second time is measured."""
    start = Quickstart(n_tasks, group, slots)
    engines = {"plain": start.engine(), "guess": start.engine(draft)}
    facts: Facts = {}
    ids: dict[str, list] = {}
    for name, engine in list(engines.items()) * 2:
        ids[name], facts[name] = start.play(engine, "host")
    return start.report(ids, facts)
