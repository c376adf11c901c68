"""Finds the local folder of a checkpoint that is named by a path or by a Hub repository."""

from __future__ import annotations

from pathlib import Path

from glm5.errors import CheckpointError

# Weights, configuration and tokenizer; a published repository may hold more.
_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]


def hf_folder(dir_or_repo_id: str | Path) -> Path:
    """The folder itself, or the Hub snapshot of a repository, downloaded or from the cache.

    Raises:
        CheckpointError: neither a folder nor a repository that can be had here.
    """
    folder = Path(dir_or_repo_id)
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(snapshot_download(str(dir_or_repo_id), allow_patterns=_PATTERNS))
    except (HFValidationError, OSError, ValueError) as error:
        raise CheckpointError(
            "no such checkpoint",
            got=str(dir_or_repo_id),
            expected="a local Hugging Face folder, or the id of a repository on the Hub",
            remedy=f"check the path; the Hub said: {str(error).splitlines()[0]}",
        ) from error
