"""The training variants: which parameter sets there are, which roles train them, and who answers a call."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from ml_collections import ConfigDict

from envace_jax.config import UserError
from envace_jax.rehearsal.observers import EndpointObserver, Observer, RealObserver, observe_recorded
from envace_jax.text.transcript import Role

SHARED = {"policy": (Role.ACT, Role.REHEARSE)}
ACT_ONLY = {"policy": (Role.ACT,)}


@dataclasses.dataclass(frozen=True)
class Arm:
    """One variant.

    learners: trained parameter sets and the roles whose outputs train them.  frozen: sets that keep the initial
    parameters.  act_params, rehearse_params: the set that each role samples from.  observe: answers the calls in
    REHEARSE's place.
    """

    baseline: str
    learners: Mapping[str, tuple[Role, ...]]
    frozen: tuple[str, ...] = ()
    act_params: str = "policy"
    rehearse_params: str = "policy"
    observe: Observer | None = None
    observe_workers: int = 0


def learners_of(arm: str) -> Mapping[str, tuple[Role, ...]]:
    """The parameter sets that an arm trains, each with the roles whose outputs train it."""
    if arm == "per_role":
        return {"policy": (Role.ACT,), "rehearse": (Role.REHEARSE,)}
    return SHARED if arm in ("envace", "single_baseline") else ACT_ONLY


def make_arm(cfg: ConfigDict) -> Arm:
    """The arm that the configuration names.

    `envace`: shared parameters, a baseline for each role.  `single_baseline`: the same with one baseline.  `per_role`:
    a parameter set for each role.  `frozen_rehearse`: the initial policy rehearses.  `recorded`, `real_env`,
    `act_only_endpoint`: nobody rehearses; records, a real environment or an outside simulator answer.
    """
    name, baseline = cfg.learning.arm, cfg.learning.baseline
    learners = learners_of(name)
    if name == "envace":
        return Arm(baseline, learners)
    if name == "single_baseline":
        return Arm("single", learners)
    if name == "per_role":
        return Arm(baseline, learners, rehearse_params="rehearse")
    if name == "frozen_rehearse":
        return Arm(baseline, learners, frozen=("frozen",), rehearse_params="frozen")
    if name == "recorded":
        return Arm(baseline, learners, observe=observe_recorded)
    if name == "real_env":
        return Arm(baseline, learners, observe=RealObserver())
    if name == "act_only_endpoint":
        workers = int(cfg.rollout.simulator.concurrency)
        return Arm(baseline, learners, observe=_simulator(cfg), observe_workers=workers)
    raise UserError(f"learning.arm='{name}': expected one of the arms that `envace_jax config` lists")


class SimulatorFailed(RuntimeError):
    """The outside simulator gave no answer: the trajectory is masked."""


def _simulator(cfg: ConfigDict) -> EndpointObserver:
    from envace_jax.endpoint import Endpoint, EndpointSettings

    endpoint = Endpoint(EndpointSettings.from_config(cfg.rollout.simulator))

    def ask(system: str, user: str) -> str:
        rules = [{"role": "system", "content": system}] if system else []
        done = endpoint.complete([*rules, {"role": "user", "content": user}])
        if done.text is None:
            raise SimulatorFailed(f"{done.cause}: {done.detail}")
        return done.text

    return EndpointObserver(ask)
