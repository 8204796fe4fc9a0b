"""What can be known before weights are read and programs compiled is said then."""

from __future__ import annotations

from pathlib import Path

import pytest
from learning_common import tiny_config

from envace_jax.config import UserError
from envace_jax.distributed import Processes
from envace_jax.learning import setup
from envace_jax.learning.preflight import preflight

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.quick

JUDGE = {"rewards.judge": "policy", "rewards.policy.path": "data/quickstart/model"}
CASES = [
    ({"learning.prompts_per_step": 50}, "takes 50 tasks, the data set has 12"),
    ({"mesh.fsdp": 512}, "asks for 512 devices"),
    ({"rollout.grounding": "worldbook", "rollout.worldbook": "tests"}, "tests"),
    ({"rewards.judge": "policy", "rewards.policy.path": "data/quickstart/tokenizer"}, "data/quickstart/tokenizer"),
    (JUDGE | {"rewards.policy.devices": 3}, "key/value heads cannot be cut over them"),
    (JUDGE | {"rewards.policy.devices": 8}, "a process has 8 devices, of which training needs some"),
    (JUDGE | {"rewards.policy.devices": 2, "mesh.fsdp": 8}, "asks for 8 devices, 6 are there"),
    ({"rewards.judge": "endpoint", "rewards.endpoint.base_url": "http://x"}, "endpoint model=''"),
    ({"rollout.constrain": "act"}, "set learning.importance_cap"),
    ({"learning.max_staleness": 1}, "set learning.importance_cap"),
]


@pytest.mark.parametrize(("changes", "words"), CASES)
def test_a_run_stops_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict, words: str
) -> None:
    def read(*_: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(setup, "load_model", read)
    with pytest.raises(UserError, match=words), setup.prepare(tiny_config(tmp_path, **changes), tmp_path):
        pass


def test_all_of_it_is_collected_where_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    chosen = [CASES[k] for k in (0, 1, 2, 3, 8)]
    cfg = tiny_config(tmp_path, **{key: value for changes, _ in chosen for key, value in changes.items()})
    wrong: list[str] = []
    ground = preflight(cfg, Processes(), print, wrong)
    assert len(wrong) == len(chosen) and all(any(words in line for line in wrong) for _, words in chosen)
    assert ground.data is None and ground.grounding is None and ground.spec is not None
