"""The rules by which settings name linears are PEFT's own."""

import pytest

from glm5.lora.patterns import broken_patterns, by_pattern, first_match, matches

PATH = "model.layers.3.mlp.experts.7.up_proj"


@pytest.mark.parametrize(
    "pattern",
    ["up_proj", "experts.7.up_proj", r"experts\.\d+\.up_proj", PATH, r".*\.3\..*", "p_proj", "up"],
)
def test_a_pattern_matches_as_in_peft(pattern: str) -> None:
    from peft.utils.other import get_pattern_key

    found = first_match([pattern], PATH)
    # PEFT gives back the name where nothing matches
    assert (found or PATH) == get_pattern_key([pattern], PATH)
    assert by_pattern({pattern: 1}, PATH, 2) == (1 if found else 2)


def test_the_first_pattern_that_matches_counts() -> None:
    assert by_pattern({"gate_proj": 1, "up_proj": 2, PATH: 3}, PATH, 4) == 2
    assert by_pattern(None, PATH, 4) == by_pattern({}, PATH, 4) == 4


@pytest.mark.parametrize(
    "targets",
    [("up_proj",), ("experts.7.up_proj",), (PATH,), ("p_proj",), ("proj", "gate_proj"), "up_proj",
     r".*up_proj", r"model\..*\.7\..*"],
    ids=str,
)  # fmt: skip
def test_exclusion_is_pefts(targets: tuple[str, ...] | str) -> None:
    from peft import LoraConfig
    from peft.tuners.tuners_utils import check_target_module_exists

    excluded = targets if isinstance(targets, str) else list(targets)
    config = LoraConfig(target_modules=".*", exclude_modules=excluded)
    assert matches(PATH, targets) == (not check_target_module_exists(config, PATH))


def test_nothing_matches_nothing() -> None:
    assert not any(matches(PATH, targets) for targets in (None, (), ""))


def test_broken_patterns_are_told() -> None:
    assert broken_patterns(["up_proj", r"\d+"]) == []
    (problem,) = broken_patterns(["ok", "(up"])
    assert problem.startswith("'(up': ")


def test_a_pattern_that_is_broken_as_an_ending_alone_is_told() -> None:
    assert len(broken_patterns(["(?i)UP_PROJ"])) == 1
    assert broken_patterns((), "(?i)model.*") == []
    assert len(broken_patterns((), "(up")) == 1


def test_many_patterns_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    patterns = [rf"layers\.{i}\.up_proj" for i in range(600)]
    assert first_match(patterns, "model.layers.599.up_proj") == patterns[-1]
    monkeypatch.setattr("re.compile", lambda pattern: pytest.fail(f"{pattern} again"))
    assert first_match(patterns, "model.layers.599.up_proj") == patterns[-1]
