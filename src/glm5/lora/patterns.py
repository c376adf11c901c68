"""PEFT's rules for which names a setting means."""

import re
from collections.abc import Collection, Iterable, Mapping
from functools import cache


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
    return next((pattern for pattern in patterns if of_ending(pattern).match(name)), None)


@cache
def of_ending(pattern: str) -> re.Pattern[str]:
    """What matches a name of which `pattern` matches all, or an ending.

    Kept, because `re` forgets all but 512 of them, and an adapter may have one for each linear.
    """
    return re.compile(rf"(.*\.)?({pattern})$")


def by_pattern[T](patterns: Mapping[str, T] | None, name: str, default: T) -> T:
    """The value of the first pattern that matches."""
    if not patterns:
        return default
    found = first_match(patterns, name)
    return default if found is None else patterns[found]


def broken_patterns(patterns: Iterable[str], whole: str | None = None) -> list[str]:
    """What is wrong with patterns of names or endings, and with one of `whole` names."""
    problems = [f"{pattern!r}: {problem}" for pattern in patterns if (problem := _problem(pattern))]
    if whole is not None:
        try:
            re.compile(whole)
        except re.error as error:
            problems.append(f"{whole!r}: {error}")
    return problems


def _problem(pattern: str) -> str | None:
    try:
        # alone, too: what opens in it must close in it
        re.compile(pattern)
        of_ending(pattern)
    except re.error as error:
        return str(error)
    return None
