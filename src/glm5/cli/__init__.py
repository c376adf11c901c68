"""The command line: thin verbs over the library."""

from __future__ import annotations


def main() -> None:
    """Entry point of `glm5`; exit codes: 0 good, 1 a check failed, 2 wrong usage or input."""
    from glm5.cli.process import run

    run()
