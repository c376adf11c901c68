"""Whether a boxed answer equals a label as mathematics, told by math-verify in a child process."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from glm5.errors import RewardError

_BOXED = re.compile(r"\\boxed\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


def last_boxed(text: str) -> str | None:
    r"""What stands in the last \boxed{...}; None without one, or where it is not closed.

    Braces inside must match; \{ and \} are no braces.
    """
    starts = [match.end() for match in _BOXED.finditer(text)]
    if not starts:
        return None
    depth = 1
    for brace in _BRACE.finditer(text, starts[-1]):
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if depth == 0:
            return text[starts[-1] : brace.start()].strip()
    return None


class MathVerifier:
    """Compares answers with labels in a child process, which may be killed at no harm to the run.

    It starts with the first question, takes some 100 MB, and ends with this process at the latest.
    May be called from any thread; one question at a time.

    num_failures: questions without an answer, because they took longer than the limit or too much
    memory.
    """

    def __init__(self, limit_seconds: float) -> None:
        """limit_seconds: of one comparison, > 0.

        Raises:
            RewardError: math-verify is not installed.
        """
        if importlib.util.find_spec("math_verify") is None:
            raise RewardError(
                "the math reward needs the package math-verify",
                got="it is not installed",
                remedy="pip install math-verify",
            )
        self.limit_seconds = limit_seconds
        self.num_failures = 0
        self._child: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()

    def equal(self, answer: str, label: str) -> bool:
        """False also where the comparison failed: such an answer cannot be checked.

        Raises:
            RewardError: the label is no mathematics, or takes too long in itself.
        """
        with self._lock:
            told = self._ask(answer, label)
            if told is not None:
                return told
            self.num_failures += 1
            # what is the model's fault must not stop the run, what is the data's must not pass
            if self._ask("0", label) is None:
                raise RewardError(
                    "math-verify cannot handle the label",
                    got=repr(label),
                    expected=f"one that is compared with 0 within {self.limit_seconds:g} s",
                )
            return False

    def close(self) -> None:
        """Ends the child; a later question starts another one."""
        with self._lock:
            self._end()

    def _ask(self, answer: str, label: str) -> bool | None:
        """None where the child died of the question."""
        child = self._child or self._start()
        told = _exchange(child, {"answer": answer, "label": label})
        if told is None:
            self._end()
            return None
        if "bad_label" in told:
            raise RewardError("the label is no mathematics", got=repr(label))
        return bool(told["equal"])

    def _start(self) -> subprocess.Popen[str]:
        script = Path(__file__).with_name("math_worker.py")
        # -P: modules of this package must not stand in for those of the same name elsewhere
        child = subprocess.Popen(
            [sys.executable, "-P", str(script), str(self.limit_seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
            # a signal to stop is for this process alone
            start_new_session=True,
        )
        self._child = child
        if _next_line(child) is None:
            self._end()
            raise RewardError(
                "the process that compares answers does not start",
                got=f"exit status {child.returncode}",
                remedy=f"see what {sys.executable} -P {script} 10 says",
            )
        return child

    def _end(self) -> None:
        if self._child is None:
            return
        self._child.kill()
        self._child.communicate()
        self._child = None


def _exchange(child: subprocess.Popen[str], question: dict[str, str]) -> dict[str, Any] | None:
    assert child.stdin is not None
    try:
        child.stdin.write(json.dumps(question) + "\n")
        child.stdin.flush()
    except BrokenPipeError:
        return None
    return _next_line(child)


def _next_line(child: subprocess.Popen[str]) -> dict[str, Any] | None:
    assert child.stdout is not None
    line = child.stdout.readline()
    return json.loads(line) if line else None
