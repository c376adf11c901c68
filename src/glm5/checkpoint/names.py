"""Tensor names in error messages."""

from collections.abc import Collection

SHOWN_NAMES = 10


def summarise(names: Collection[str]) -> str:
    """The count and the first ten names, for an error message."""
    shown = sorted(names)[:SHOWN_NAMES]
    more = ", ..." if len(names) > SHOWN_NAMES else ""
    return f"{len(names)}: {', '.join(shown)}{more}"
