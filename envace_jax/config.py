"""One configuration tree (ml_collections), checked whole before anything is compiled."""

from __future__ import annotations

from ml_collections import ConfigDict


class UserError(ValueError):
    """A mistake the user can mend: printed as one message without a traceback, exit status 2."""
