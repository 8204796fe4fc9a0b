"""To and from a model hub: the two calls, with what can go wrong said in one line."""

from __future__ import annotations

import re
from pathlib import Path

from envace_jax.config import UserError
from envace_jax.model.hf_folder import CHECKSUMS, verify_folder

# Weights and what belongs to them; pickles, other frameworks' weights and code stay where they are.
DOWNLOADED = ("*.safetensors", "*.safetensors.index.json", "*.json", "*.txt", "*.jinja", "tokenizer.model", CHECKSUMS)
REPO = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")


def is_repo_id(text: str) -> bool:
    """Whether this reads as `owner/name` and is no folder here."""
    return REPO.fullmatch(text) is not None and not Path(text).exists()


def download(repo: str, revision: str | None = None, endpoint: str | None = None) -> Path:
    """The checkpoint folder of a hub repository in the local hub cache (an interrupted download goes on)."""
    import huggingface_hub

    try:
        return Path(
            huggingface_hub.snapshot_download(
                repo, revision=revision, allow_patterns=list(DOWNLOADED), endpoint=endpoint
            )
        )
    except Exception as error:  # the client raises its own, httpx's and the system's errors
        raise UserError(f"{repo}: cannot be downloaded ({_short(error)}); give a local folder instead") from None


def push(folder: str | Path, repo: str, *, private: bool = True, endpoint: str | None = None) -> str:
    """Uploads a folder that `save_params` wrote, after checking it against its checksums; returns the address.

    The token comes from the hub client's own places (`HF_TOKEN`, or the file that `hf auth login` wrote).
    """
    import huggingface_hub

    if not REPO.fullmatch(repo):
        raise UserError(f"--push_to {repo}: expected owner/name")
    verify_folder(folder)
    try:
        api = huggingface_hub.HfApi(endpoint=endpoint)
        api.create_repo(repo, private=private, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repo, folder_path=str(folder), commit_message="Upload checkpoint written by envace_jax"
        )
    except Exception as error:
        raise UserError(f"{repo}: cannot be pushed ({_short(error)}); the folder {folder} is whole") from None
    return str(commit.commit_url)


def _short(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}"
