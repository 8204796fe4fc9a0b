"""Constrained rollouts: ACT's calls fit their tools, REHEARSE's results are JSON between their tags.

`rollout.constrain` is `none`, `act`, `rehearse` or `both`. What is sampled, and the log-probabilities stored with it,
are then those of the masked distribution; a tool whose schema the grammar cannot follow gets any object.
"""

from __future__ import annotations

from envace_jax.rehearsal.state import EpisodeState, Need
from envace_jax.text.constrain import TokenGuide
from envace_jax.text.transcript import Role


def guide_for(state: EpisodeState, need: Need) -> TokenGuide | None:
    """The guide of the segment that an episode waits for; None where it is sampled freely."""
    constrainer, cfg = state.setting.constrainer, state.setting.cfg
    if constrainer is None or cfg.constrain not in (need.role.value, "both"):
        return None
    if need.role is Role.REHEARSE:
        return constrainer.result(cfg.rehearse_tag, objects_only=cfg.objects_only)
    if not state.task.tools:
        return None
    return constrainer.calls(state.task.tools, lenient=True)
