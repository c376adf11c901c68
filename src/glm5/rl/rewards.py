"""What a completion is worth: the rewards that a run file can name."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import math
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Protocol

import numpy as np

from glm5.errors import RewardError
from glm5.rl.reward_math import MathVerifier, last_boxed

DEFAULT_TIMEOUT_SECONDS = 10.0
# Squares of gradients that grow with it must fit into fp32.
MAX_REWARD = 1e15

Label = str | int | float | None
RewardKind = Literal["math", "exact", "regex", "function"]
# (text of the completion, label, the data's row) -> a number
Score = Callable[[str, Label, Mapping[str, Any]], object]


class RewardSettings(Protocol):
    """What `build_reward` reads of a run.

    pattern: of kind regex. function: of kind function, `package.module:name` or `file.py:name`.
    timeout_seconds: of one comparison of kind math, > 0; None: 10.
    """

    @property
    def kind(self) -> RewardKind: ...
    @property
    def pattern(self) -> str | None: ...
    @property
    def function(self) -> str | None: ...
    @property
    def timeout_seconds(self) -> float | None: ...


class Reward:
    """Scores completions; `close` ends what it started.

    needs_label: whether a row of the data must have a label.
    """

    def __init__(
        self, score: Score, *, needs_label: bool, verifier: MathVerifier | None = None
    ) -> None:
        self.needs_label = needs_label
        self._score = score
        self._verifier = verifier

    def __call__(self, name: str, text: str, label: Label, row: Mapping[str, Any]) -> float:
        """The reward of the completion `text` of the request `name`.

        Raises:
            RewardError: with the request's name; the reward fails, ends the program, or is no
                finite number of at most 1e15.
        """
        try:
            with _running_users_code():
                value = self._score(text, label, row)
        except RewardError as error:
            what = f"{name}: {error.what}"
            raise RewardError(what, got=error.got, expected=error.expected) from None
        except _UsersError as error:
            what = f"{name}: the reward function failed"
            raise RewardError(what, got=error) from error.__cause__
        number = _number(value)
        if not math.isfinite(number):
            raise RewardError(
                f"{name}: the reward is not a finite number",
                got=f"{value!r:.80}",
                expected="an int, a float or a bool",
            )
        if abs(number) > MAX_REWARD:
            raise RewardError(
                f"{name}: the reward is too large",
                got=f"{number:g}",
                expected=f"numbers from {-MAX_REWARD:g} to {MAX_REWARD:g}",
                remedy="divide it: only differences within a group count",
            )
        return number

    @property
    def num_failures(self) -> int:
        """Comparisons that took too long so far; such completions had the reward 0."""
        return self._verifier.num_failures if self._verifier else 0

    def close(self) -> None:
        """Ends a child process, if there is one."""
        if self._verifier is not None:
            self._verifier.close()


class _UsersError(Exception):
    """What the user's code raised, as `Type: text`; the cause is the error itself."""


@contextlib.contextmanager
def _running_users_code() -> Iterator[None]:
    """A function or module of the user's may raise anything, and may print.

    Standard output holds the run's result alone: what is printed goes to standard error. An end of
    the program is an error of that code; the end that a signal asked for goes on.
    """
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except RewardError:
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, SystemExit) and error.code == 128 + signal.SIGTERM:
            raise
        raise _UsersError(f"{type(error).__name__}: {error}") from error


def _number(value: object) -> float:
    """NaN for what is none."""
    try:
        return float(value) if isinstance(value, Real | np.bool_) else math.nan
    except OverflowError:
        return math.inf


def build_reward(settings: RewardSettings) -> Reward:
    r"""The reward of a run; all but `function` give 1 or 0.

    math: the last \boxed{...} equals the label, by math-verify, which knows fractions, roots,
        sets, intervals, units. Without a closed box it is 0. Words are products of letters to it,
        in which order does not count: use exact or regex for those.
    exact: the whole text equals the label, both stripped; reasoning is part of the text.
    regex: the first group of the last match, stripped, equals the label; a pattern without groups
        must be found anywhere, and needs no label. Python's re knows no time limit: a repetition
        inside a repetition may take forever on what a model writes.
    function: what it returns for (text, label, row), row being the whole row of the data.
    Labels that are numbers are compared as they are printed: 0.5 is "0.5".

    Raises:
        RewardError: the pattern or the function is missing or wrong, or math-verify is missing.
    """
    if settings.kind == "math":
        verifier = MathVerifier(settings.timeout_seconds or DEFAULT_TIMEOUT_SECONDS)
        return Reward(_math(verifier), needs_label=True, verifier=verifier)
    if settings.kind == "exact":
        return Reward(_exact, needs_label=True)
    if settings.kind == "regex":
        pattern = _compile(settings.pattern)
        return Reward(_regex(pattern), needs_label=pattern.groups > 0)
    return Reward(_load_function(settings.function), needs_label=False)


def _math(verifier: MathVerifier) -> Score:
    def score(text: str, label: Label, row: Mapping[str, Any]) -> bool:
        answer = last_boxed(text)
        return answer is not None and verifier.equal(answer, str(label).strip())

    return score


def _exact(text: str, label: Label, row: Mapping[str, Any]) -> bool:
    return text.strip() == str(label).strip()


def _regex(pattern: re.Pattern[str]) -> Score:
    def score(text: str, label: Label, row: Mapping[str, Any]) -> bool:
        if not pattern.groups:
            return pattern.search(text) is not None
        found = [match.group(1) for match in pattern.finditer(text)]
        return bool(found) and found[-1] is not None and found[-1].strip() == str(label).strip()

    return score


def _compile(pattern: str | None) -> re.Pattern[str]:
    if not pattern:
        # it would be found in every text
        raise RewardError("a reward of kind regex has no pattern", got=repr(pattern))
    try:
        return re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise RewardError(
            "the pattern of the reward is no regular expression",
            got=f"{pattern!r}: {error}",
            expected="a pattern of Python's re, with the answer in its first group",
        ) from None


def _load_function(place: str | None) -> Score:
    home, colon, name = (place or "").rpartition(":")
    if not (home and colon and name):
        raise RewardError(
            "the reward function is not named",
            got=repr(place),
            expected="package.module:function, or path/to/file.py:function",
        )
    try:
        with _running_users_code():
            is_file = home.endswith(".py")
            module = _module_of_file(Path(home)) if is_file else importlib.import_module(home)
    except _UsersError as error:
        raise RewardError(
            f"cannot import the reward function's {home}",
            got=error,
            remedy=None if is_file else "is it on PYTHONPATH? path/to/file.py:function needs none",
        ) from error.__cause__
    function = getattr(module, name, None)
    if not callable(function):
        raise RewardError(f"{home} has no function {name}", got=repr(function))
    _check_arguments(function, place)
    return function


def _module_of_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise FileNotFoundError(f"no file {path.absolute()}")
    name = f"glm5_reward_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # dataclasses and pickle look modules up by their names
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _check_arguments(function: Callable[..., Any], place: str | None) -> None:
    try:
        # functions written in C may not tell
        with contextlib.suppress(ValueError):
            inspect.signature(function).bind("text", "label", {})
    except TypeError as error:
        raise RewardError(
            f"the reward function {place} takes other arguments",
            got=error,
            expected="three: the completion's text, the label, the row",
        ) from None
