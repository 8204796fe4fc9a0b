"""A process that is late costs no run: groups of devices are connected before they are needed."""

from __future__ import annotations

import pytest
from learning_common import together


@pytest.mark.long
def test_groups_that_were_connected_wait_for_the_late():
    for said in together("groups_child.py", "connected"):
        assert "all came together" in said, said[-3000:]


@pytest.mark.long
def test_groups_that_were_not_connected_do_not():
    """Why `connect` is there; where this fails, XLA has learned to wait, and it may go."""
    assert any("Gloo context initialization failed" in said for said in together("groups_child.py", "late"))
