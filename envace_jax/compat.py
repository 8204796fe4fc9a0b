"""Version differences and process-wide settings in one place."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from pathlib import Path
from typing import Any

from envace_jax.config import UserError

MINIMUM = {"jax": (0, 10, 2), "flax": (0, 12, 8)}


def version_of(package: str) -> tuple[int, ...] | None:
    """Installed version as numbers, None where the package is not there."""
    try:
        text = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
    return tuple(int(p) for p in text.split("+")[0].split(".") if p.isdigit())


def check_versions() -> None:
    """Raises `UserError` for a pair of jax and flax that is known not to work.

    On jax 0.11 and later flax before 0.12.11 fails at import (flax issue 5596).
    """
    for package, least in MINIMUM.items():
        found = version_of(package)
        if found is None or found < least:
            raise UserError(
                f"{package} {'.'.join(map(str, found)) if found else 'is missing'}: expected at least "
                f"{'.'.join(map(str, least))}; run launch/quickstart.sh or pip install -r requirements.txt"
            )
    if version_of("jax") >= (0, 11) and version_of("flax") < (0, 12, 11):  # type: ignore[operator]
        raise UserError("jax 0.11 and later need flax >= 0.12.11: pip install -U 'flax>=0.12.11'")


def has_tpu(root: Path = Path("/")) -> bool:
    """Whether this machine has a TPU chip: a device of Google's PCI vendor number, or a driver's device file."""
    vendors = (root / "sys/bus/pci/devices").glob("*/vendor")
    return any(v.read_text().strip() == "0x1ae0" for v in vendors) or any((root / "dev").glob("accel*"))


def skip_tpu_search() -> None:
    """Without a TPU chip, libtpu (which `plan` needs) is not loaded to look for one: it complains on standard error.

    Left alone: a platform that the user chose, `JAX_FORCE_TPU_INIT`, and machines where another plugin (CUDA) could
    be the device.
    """
    chosen = os.environ.get("JAX_PLATFORMS") or os.environ.get("JAX_FORCE_TPU_INIT")
    if chosen or importlib.util.find_spec("libtpu") is None or has_tpu():
        return
    if importlib.util.find_spec("jax_plugins") is None and not importlib.metadata.entry_points(group="jax_plugins"):
        import jax

        if not getattr(jax.config, "jax_platforms", None):  # its type does not name its options
            jax.config.update("jax_platforms", "cpu")


def set_up_jax() -> None:
    """Checks versions and points jax at a compilation cache that outlives the process.

    The cache lies in `ENVACE_JAX_CACHE`, else in the user's cache folder; a variable that jax itself reads
    (`JAX_COMPILATION_CACHE_DIR`) stands above both.
    """
    check_versions()
    skip_tpu_search()
    import jax

    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", os.environ.get("ENVACE_JAX_CACHE", f"{base}/envace_jax/jax"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)


def key_value_store() -> Any:
    """The coordinator's key-value store and barriers of a run of several processes (jax has no public name for it)."""
    from jax._src import distributed

    client = distributed.global_state.client
    if client is None:
        raise RuntimeError("jax.distributed is not initialised")
    return client
