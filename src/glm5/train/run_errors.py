"""Tell pydantic's validation errors the way this project tells errors."""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from glm5.errors import ConfigError

# Python's words for types, in the words of TOML.
_EXPECTED = {
    "is_instance_of": "a path (a string that is not empty)",
    "path_type": "a path (a string that is not empty)",
    "tuple_type": "a list",
    "too_short": "a list that is not empty",
    "string_too_short": "a string that is not empty",
    "model_type": "a table",
    "dict_type": "a table",
    "invalid-json-value": "a string, a number, a boolean, a list or a table",
}


def describe_errors(
    error: ValidationError, model: type[BaseModel], source: str, overridden: set[str]
) -> ConfigError:
    """Return one ConfigError that lists every problem: dotted name, got, expected.

    Args:
        error: what pydantic raised.
        model: the model that was validated; its names are the known names.
        source: the file that the values came from.
        overridden: dotted names that an override set; their lines say so.
    """
    lines = []
    for problem in error.errors(include_url=False):
        name = ".".join(str(part) for part in problem["loc"])
        origin = " (from --set)" if _is_overridden(name, overridden) else ""
        lines.append(f"{name or 'run'}{origin}: {_reason(problem, name, model)}")
    noun = "1 problem" if len(lines) == 1 else f"{len(lines)} problems"
    return ConfigError("\n    ".join([f"{source}: {noun}", *lines]))


def known_names(model: type[BaseModel], prefix: str = "") -> list[str]:
    """Return every dotted field name of a model and of the models inside it."""
    names = []
    for key, field in model.model_fields.items():
        section = _section_of(field.annotation)
        names.append(f"{prefix}{key}")
        if section is not None:
            names += known_names(section, f"{prefix}{key}.")
    return names


def _section_of(annotation: Any) -> type[BaseModel] | None:
    # A section may be optional, that is a union with None.
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def _is_overridden(name: str, overridden: set[str]) -> bool:
    # An override may set a leaf inside the named table, or a table around the named leaf.
    return any(f"{key}.".startswith(f"{name}.") or name.startswith(f"{key}.") for key in overridden)


def _reason(problem: Mapping[str, Any], name: str, model: type[BaseModel]) -> str:
    kind, got = problem["type"], problem["input"]
    if kind == "extra_forbidden":
        return f"unknown key{_nearest(name, known_names(model))}"
    if kind == "missing":
        return "missing; this key has no default"
    if kind == "value_error":
        return str(problem["ctx"]["error"])
    expected = _EXPECTED.get(kind) or str(problem["msg"]).removeprefix("Input should be ")
    hint = _nearest_literal(got, problem.get("ctx", {}).get("expected"))
    return f"got {_show(got)}, expected {expected}{hint}"


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _nearest(name: str, known: Sequence[str]) -> str:
    parent, _, key = name.rpartition(".")
    siblings = [n.rpartition(".")[2] for n in known if n.rpartition(".")[0] == parent]
    elsewhere = [n for n in known if n.rpartition(".")[2] == key]
    if elsewhere:
        return f"; the nearest known name is {elsewhere[0]}"
    close = get_close_matches(key, siblings, n=1)
    if close:
        return f"; the nearest known name is {parent + '.' if parent else ''}{close[0]}"
    leaves = {n.rpartition(".")[2]: n for n in known}
    # In another section only a slip of the pen is meant, not a word of the same length.
    far = get_close_matches(key, list(leaves), n=1, cutoff=0.8)
    if far:
        return f"; the nearest known name is {leaves[far[0]]}"
    return f"; known here are {', '.join(siblings)}"


def _nearest_literal(got: Any, expected: Any) -> str:
    if not isinstance(got, str) or not isinstance(expected, str):
        return ""
    choices = expected.replace(" or ", ", ").replace("'", "").split(", ")
    close = get_close_matches(got, choices, n=1)
    return f"; did you mean {close[0]}?" if close else ""
