"""PEFT's rules for which names a setting means."""

import re
from collections.abc import Collection, Iterable, Mapping


def matches(name: str, targets: Collection[str] | str | None) -> bool:
    """PEFT's rule: a string is a regular expression for all of the name, a list holds endings."""
    if isinstance(targets, str):
        return re.fullmatch(targets, name) is not None
    if not targets:
        return False
    parts = name.split(".")
    return any(".".join(parts[i:]) in targets for i in range(len(parts)))


def first_match(patterns: Iterable[str], name: str) -> str | None:
    """PEFT's rule: the first pattern that matches the name or an ending of it; None if none does.

    An ending starts after a dot.
    """
    for pattern in patterns:
        if re.match(rf"(.*\.)?({pattern})$", name):
            return pattern
    return None


def by_pattern[T](patterns: Mapping[str, T] | None, name: str, default: T) -> T:
    """The value of the first pattern that matches."""
    if not patterns:
        return default
    found = first_match(patterns, name)
    return default if found is None else patterns[found]


def broken_patterns(patterns: Iterable[str]) -> list[str]:
    """What is wrong with those that are no regular expressions."""
    problems = []
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            problems.append(f"{pattern!r}: {error}")
    return problems
