"""Interrupts that arrive while a library is at work."""

from __future__ import annotations

import os
import signal

import pytest

from envace_jax.interrupts import Interrupts, Preempted

pytestmark = pytest.mark.quick


def changed() -> None:
    """SIGTERM within a library that makes an error of its own of whatever is raised in it."""
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    except BaseException as error:
        raise ValueError("metadata") from error


def test_an_interrupt_that_a_library_changed_is_raised_as_what_it_was():
    with Interrupts() as interrupts, pytest.raises(Preempted), interrupts.as_themselves():
        changed()


def test_an_error_of_its_own_stays_one():
    with Interrupts() as interrupts, pytest.raises(ValueError), interrupts.as_themselves():
        raise ValueError("own")
    with Interrupts() as interrupts, pytest.raises(ValueError), interrupts.as_themselves():
        interrupts.hold()
        os.kill(os.getpid(), signal.SIGTERM)  # waits
        raise ValueError("own")
