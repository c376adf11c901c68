"""Find a model's config.json, locally or in the Hub cache, and read it strictly."""

import contextlib
import json
from pathlib import Path
from typing import Any, NoReturn

from glm5.errors import ConfigError

CONFIG_NAME = "config.json"


def find_config_file(dir_or_repo_id: str | Path) -> Path:
    """The path of config.json in a local folder, else in the Hub repository of that name.

    A folder that exists wins over a repository of the same name, and a cached copy over the Hub.
    Raises ConfigError when neither holds a config.json.
    """
    folder = Path(dir_or_repo_id)
    if folder.is_dir():
        path = folder / CONFIG_NAME
        if not path.is_file():
            raise ConfigError(
                f"no {CONFIG_NAME} in {folder}",
                expected="a Hugging Face model folder",
                remedy="name the folder that holds config.json and the safetensors files",
            )
        return path
    if folder.is_file():
        raise ConfigError(
            f"{folder} is a file",
            expected="the folder that holds config.json, or a Hub repository id",
            remedy=f"name its folder: {folder.parent}",
        )
    return _find_in_hub(dir_or_repo_id)


def _find_in_hub(repo_id: str | Path) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HFValidationError

    # What is cached wins: without a network, asking the Hub takes half a minute of retries.
    with contextlib.suppress(HFValidationError, EntryNotFoundError, OSError):
        return Path(hf_hub_download(str(repo_id), CONFIG_NAME, local_files_only=True))
    # OSError covers the Hub's HTTP errors, no network, and offline mode with an empty cache.
    try:
        return Path(hf_hub_download(str(repo_id), CONFIG_NAME))
    except (HFValidationError, EntryNotFoundError, OSError) as error:
        raise ConfigError(
            f"no model at {str(repo_id)!r}: not a local folder, and not readable from the Hub",
            got=str(error).strip().partition("\n")[0],
            expected="a folder with config.json, or the id of a Hub repository that has one",
            remedy="check the spelling; offline, download the repository first",
        ) from error


def read_config_file(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; ConfigError on any text that is not one plain JSON object."""
    try:
        raw = json.loads(
            path.read_text(encoding="utf-8"),
            object_pairs_hook=_unique_keys,
            parse_constant=_reject_constant,
        )
    except OSError as error:
        raise ConfigError(f"cannot read {path}", got=error) from error
    # ValueError covers bad JSON, bad UTF-8, numbers too long to read, and our own two hooks.
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path} is not valid JSON",
            got=error,
            expected="one JSON object in UTF-8",
            remedy="download the model's config.json again",
        ) from error
    if not isinstance(raw, dict):
        raise ConfigError(
            f"{path} is not a model configuration",
            got=f"a JSON {type(raw).__name__}",
            expected="one JSON object",
            remedy="download the model's config.json again",
        )
    return raw


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) != len(pairs):
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"key given twice: {', '.join(twice)}")
    return unique


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"the number {name} is not JSON")
