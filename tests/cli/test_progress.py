"""Bars of bytes: speed, and an end of their own."""

import io
import time

from rich.console import Console
from rich.progress import Progress

from glm5.cli.progress import byte_bar


def test_bytes_have_a_speed_and_leave_room_for_another_bar() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    with byte_bar("reading", quiet=False, console=console) as hear:
        for done in (1, 2, 3):
            hear(done * 10**9, 3 * 10**9)
            time.sleep(0.2)
        # a second one on a console where the first still ran would raise
        with Progress(console=console) as another:
            another.add_task("steps", total=1)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "reading" in text and "3.0/3.0 GB" in text and "GB/s" in text


def test_a_quiet_bar_writes_nothing() -> None:
    console = Console(file=io.StringIO(), force_terminal=True)
    with byte_bar("reading", quiet=True, console=console) as hear:
        hear(1, 2)
    assert console.file.getvalue() == ""  # type: ignore[attr-defined]
