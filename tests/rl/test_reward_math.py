"""The last boxed answer, and comparisons that may never end."""

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from glm5.errors import RewardError
from glm5.rl.reward_math import MathVerifier, last_boxed

# Python would count to a number of ten billion digits in one C call.
ENDLESS = "10^{10^{10}} + 1"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"so \boxed{42}.", "42"),
        (r"\boxed{1} no, \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed { x }", "x"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\{}", r"\{"),
        (r"\boxed{a \\}", r"a \\"),
        (r"\boxed{\text{two" "\n" "lines}}", "\\text{two\nlines}"),
        (r"\boxed{}", ""),
        (r"\boxed{\boxed{3}}", "3"),
        (r"\boxed{1} and \boxed{2", None),
        (r"\boxed 5", None),
        ("boxed{5}", None),
        ("", None),
    ],
)
def test_last_boxed(text: str, expected: str | None) -> None:
    assert last_boxed(text) == expected


@pytest.fixture(scope="module")
def verifier() -> Iterator[MathVerifier]:
    verifier = MathVerifier(limit_seconds=30)
    yield verifier
    verifier.close()


@pytest.mark.parametrize(
    ("answer", "label", "equal"),
    [
        ("42", "42", True),
        ("42", "43", False),
        (r"\frac{1}{2}", "0.5", True),
        (r"2\sqrt{2}", r"\sqrt{8}", True),
        ("(x+1)^2", "x^2+2x+1", True),
        ("x = 5", "5", True),
        (r"\{2, 1\}", r"\{1, 2\}", True),
        ("[0, 1]", "[0, 1)", False),
        (r"50\%", "0.5", True),
        ("1,000", "1000", True),
        (r"\text{B}", "B", True),
        ("", "1", False),
        ("}{", "1", False),
        ("\ud800", "1", False),
    ],
)
def test_answers(verifier: MathVerifier, answer: str, label: str, equal: bool) -> None:
    assert verifier.equal(answer, label) is equal
    assert verifier.num_failures == 0


@pytest.mark.parametrize("label", ["", "}"])
def test_a_label_that_is_no_mathematics(verifier: MathVerifier, label: str) -> None:
    with pytest.raises(RewardError, match="the label is no mathematics"):
        verifier.equal("1", label)
    assert verifier.equal("1", "1")


def test_other_threads_may_ask(verifier: MathVerifier) -> None:
    found: list[bool] = []
    asking = [
        threading.Thread(target=lambda n=n: found.append(verifier.equal(f"{n}", f"{n}.0")))
        for n in range(4)
    ]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    assert found == [True] * 4


def test_an_endless_answer_is_wrong_and_the_next_one_is_heard() -> None:
    verifier = MathVerifier(limit_seconds=5)
    assert verifier.equal("1", "1")
    started = time.monotonic()
    assert verifier.equal(ENDLESS, "7") is False
    assert verifier.num_failures == 1
    assert verifier.equal("7", "7")
    assert verifier.num_failures == 1
    # the limit and two starts of the child
    assert time.monotonic() - started < 120
    verifier.close()


def test_an_endless_label_is_the_data_s_fault() -> None:
    verifier = MathVerifier(limit_seconds=3)
    with pytest.raises(RewardError, match=r"cannot handle the label(.|\n)*within 3 s"):
        verifier.equal("7", ENDLESS)
    verifier.close()


def test_a_child_that_was_killed_is_started_again() -> None:
    verifier = MathVerifier(limit_seconds=30)
    assert verifier.equal("1", "1")
    assert verifier._child is not None
    os.kill(verifier._child.pid, signal.SIGKILL)
    verifier._child.wait()
    assert verifier.equal("1", "1") is False and verifier.num_failures == 1
    assert verifier.equal("1", "1")
    verifier.close()


def test_close_ends_the_child() -> None:
    verifier = MathVerifier(limit_seconds=30)
    verifier.close()
    assert verifier.equal("1", "1")
    child = verifier._child
    assert child is not None
    verifier.close()
    assert child.returncode is not None


def test_without_math_verify(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RewardError, match="pip install math-verify"):
        MathVerifier(limit_seconds=1)


def test_a_child_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(RewardError, match=r"does not start(.|\n)*exit status 1"):
        MathVerifier(limit_seconds=1).equal("1", "1")
