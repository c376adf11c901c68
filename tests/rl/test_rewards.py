"""Rewards by their kinds, and every way in which one cannot be computed."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from glm5.errors import RewardError
from glm5.rl.rewards import Label, Reward, RewardKind, build_reward


@dataclass(frozen=True)
class Settings:
    kind: RewardKind
    pattern: str | None = None
    function: str | None = None
    timeout_seconds: float | None = None


def exact() -> Reward:
    return build_reward(Settings("exact"))


def regex(pattern: str | None) -> Reward:
    return build_reward(Settings("regex", pattern=pattern))


def function(place: str | None) -> Reward:
    return build_reward(Settings("function", function=place))


def user_file(folder: Path, body: str) -> str:
    path = folder / "my_reward.py"
    path.write_text(f"def score(text, label, row):\n    {body}\n")
    return f"{path}:score"


def longer(text: str, label: Label, row: Any) -> float:
    return 0.5 * len(text) + row["bonus"]


def two_arguments(text: str, label: Label) -> float:
    return 0.0


NOT_CALLABLE = 3


@pytest.mark.parametrize(
    ("text", "label", "expected"),
    [
        (" 42\n", "42", 1.0),
        ("42", 42, 1.0),
        ("0.5", 0.5, 1.0),
        ("yes", " yes ", 1.0),
        ("the answer is 42", "42", 0.0),
        ("Yes", "yes", 0.0),
    ],
)
def test_exact(text: str, label: Label, expected: float) -> None:
    reward = exact()
    assert reward.needs_label
    assert reward("r", text, label, {}) == expected


@pytest.mark.parametrize(
    ("pattern", "text", "label", "expected"),
    [
        (r"answer: (\S+)", "answer: 4 ... answer: 5", "5", 1.0),
        (r"answer: (\S+)", "answer: 4 ... answer: 5", "4", 0.0),
        (r"answer:(.*)", "answer: 7 \n", 7, 1.0),
        (r"answer: (\S+)", "no", "no", 0.0),
        (r"(a)?b", "b", "a", 0.0),
        (r"(?:a|b)(c)", "bc", "c", 1.0),
        (r"\d{3}", "abc 123", None, 1.0),
        (r"\A\d+\Z", "abc 123", None, 0.0),
    ],
)
def test_regex(pattern: str, text: str, label: Label, expected: float) -> None:
    reward = regex(pattern)
    assert reward.needs_label == (label is not None)
    assert reward("r", text, label, {}) == expected


def test_math_takes_the_last_box() -> None:
    reward = build_reward(Settings("math", timeout_seconds=30.0))
    assert reward.needs_label
    assert reward("r", r"\boxed{3}, no: \boxed{\frac{4}{8}}", 0.5, {}) == 1.0
    assert reward("r", r"\boxed{\frac{4}{8}}, no: \boxed{3}", "0.5", {}) == 0.0
    assert reward("r", "it is 0.5", "0.5", {}) == 0.0
    with pytest.raises(RewardError, match="step-3/7: the label is no mathematics"):
        reward("step-3/7", r"\boxed{1}", " ", {})
    assert reward.num_failures == 0
    reward.close()


def test_function_of_a_file_and_of_a_module(tmp_path: Path) -> None:
    of_file = function(user_file(tmp_path, "return label in text and row['id'] == 4"))
    assert not of_file.needs_label
    assert of_file("r", "abc", "b", {"id": 4}) == 1.0
    assert of_file("r", "abc", "x", {"id": 4}) == 0.0
    of_module = function("tests.rl.test_rewards:longer")
    assert of_module("r", "abcd", None, {"bonus": 1}) == 3.0
    of_module.close()


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("return float('nan')", "not a finite number\n  got:      nan"),
        ("return float('inf')", "not a finite number"),
        ("return None", "not a finite number\n  got:      None"),
        ("return '1'", "not a finite number\n  got:      '1'"),
        ("return 1j", "not a finite number"),
        ("return 10 ** 400", "the reward is not a finite number"),
        ("return row['absent']", "the reward function failed\n  got:      KeyError: 'absent'"),
        ("return label + 1", "the reward function failed\n  got:      TypeError"),
        ("import sys; sys.exit(0)", "the reward function failed\n  got:      SystemExit: 0"),
        ("return 1e16", "the reward is too large\n  got:      1e+16"),
        ("return -1e16", "the reward is too large\n  got:      -1e+16"),
    ],
)
def test_what_is_no_reward_names_the_request(tmp_path: Path, body: str, reason: str) -> None:
    reward = function(user_file(tmp_path, body))
    with pytest.raises(RewardError) as caught:
        reward("step-3/prompt-2/1", "text", "label", {})
    assert reason in str(caught.value)
    assert str(caught.value).startswith("step-3/prompt-2/1: ")


@pytest.mark.parametrize("value", ["numpy.float32(0.25)", "numpy.int64(2)", "numpy.bool_(True)"])
def test_numbers_of_numpy_are_numbers(tmp_path: Path, value: str) -> None:
    reward = function(user_file(tmp_path, f"import numpy; return {value}"))
    found = reward("r", "", None, {})
    assert type(found) is float and found == {"f": 0.25, "i": 2.0, "b": 1.0}[value[6]]


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        (None, "the reward function is not named"),
        ("", "the reward function is not named"),
        ("glm5.errors", "the reward function is not named"),
        (":f", "the reward function is not named"),
        ("no.such.module:f", "cannot import the reward function's no.such.module"),
        ("no/such/file.py:f", "no file "),
        ("tests.rl.test_rewards:absent", "has no function absent"),
        ("tests.rl.test_rewards:NOT_CALLABLE", "has no function NOT_CALLABLE"),
        ("tests.rl.test_rewards:two_arguments", "takes other arguments"),
    ],
)
def test_functions_that_cannot_be_used(place: str | None, reason: str) -> None:
    with pytest.raises(RewardError) as caught:
        function(place)
    assert reason in str(caught.value)


def test_a_file_that_does_not_run(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("1 / 0\n")
    with pytest.raises(RewardError, match="ZeroDivisionError"):
        function(f"{path}:score")


def test_a_file_that_ends_the_program(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text("import sys\nsys.exit(0)\n")
    with pytest.raises(RewardError, match="SystemExit: 0"):
        function(f"{path}:score")


def test_a_signal_ends_the_program_all_the_same(tmp_path: Path) -> None:
    reward = function(user_file(tmp_path, "raise SystemExit(143)"))
    with pytest.raises(SystemExit):
        reward("r", "text", None, {})


def test_what_it_prints_is_no_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "talks.py"
    path.write_text("print('one')\ndef score(text, label, row):\n    print('two')\n    return 1\n")
    assert function(f"{path}:score")("r", "text", None, {}) == 1
    told = capsys.readouterr()
    assert told.out == "" and told.err == "one\ntwo\n"


def test_a_function_written_in_c_is_taken_as_it_is() -> None:
    with pytest.raises(RewardError, match=r"not a finite number(.|\n)*'text'"):
        function("builtins:min")("r", "text", "zzz", "zzzz")  # type: ignore[arg-type]


@pytest.mark.parametrize("pattern", ["(", "*", "a{99999999999999999999}", "(" * 9999 + ")" * 9999])
def test_a_pattern_that_is_none(pattern: str) -> None:
    with pytest.raises(RewardError, match="no regular expression"):
        regex(pattern)


def test_a_missing_pattern() -> None:
    with pytest.raises(RewardError, match="no pattern"):
        regex(None)
