"""Command-line overrides `key=value` of a run file, and the merge of nested tables."""

import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

from glm5.errors import ConfigError


def parse_override(text: str) -> dict[str, Any]:
    """Turn `a.b=value` into `{"a": {"b": value}}`; the value is TOML, or a bare string.

    Raises:
        ConfigError: no `=`, or an empty part in the dotted key.
    """
    key, equals, value = text.partition("=")
    parts = [part.strip() for part in key.split(".")]
    if not equals or not all(parts):
        raise ConfigError(
            "an override is not of the form key=value",
            got=repr(text),
            expected="dotted key, equals sign, TOML value, such as optimizer.lr=1e-4",
        )
    nested: Any = _toml_value(value.strip())
    for part in reversed(parts):
        nested = {part: nested}
    return dict(nested)


def _toml_value(text: str) -> Any:
    try:
        document = tomllib.loads(f"value = {text}")
    except (tomllib.TOMLDecodeError, RecursionError):
        return text
    # A line break in the text could smuggle in further keys; then it is no single value.
    return document["value"] if set(document) == {"value"} else text


def merge_tables(base: Mapping[str, Any], update: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with `update` laid over it, table by table; neither is changed."""
    merged = dict(base)
    for key, value in update.items():
        old = merged.get(key)
        both_tables = isinstance(old, Mapping) and isinstance(value, Mapping)
        merged[key] = merge_tables(old, value) if both_tables else value  # type: ignore[arg-type]
    return merged


def flatten(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, value) of every leaf; an empty table is a leaf."""
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
