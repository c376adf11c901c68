"""`glm5 demo --rl` runs what the recipes say; tests/e2e runs the whole of it."""

from pathlib import Path

from glm5.cli import demo_rl
from glm5.rl.run_config import RlConfig
from glm5.train.run_config import RunConfig
from tests.cli.conftest import Glm5

RECIPES = Path(__file__).parents[2] / "recipes"
RUNS = RECIPES.parent / "runs/tiny-grpo"


def test_it_does_what_the_recipes_say() -> None:
    warmup = RunConfig.from_toml(RECIPES / "tiny-grpo-warmup.toml")
    tables = demo_rl.warmup_tables(RUNS / "hf", RUNS / "warmup")
    assert RunConfig.from_dict(tables, source="the demo") == warmup
    grpo = RlConfig.from_toml(RECIPES / "tiny-grpo.toml")
    tables = demo_rl.grpo_tables(RUNS / "start", RUNS / "hf/data/sort.jsonl", RUNS / "run")
    assert RlConfig.from_dict(tables, source="the demo") == grpo


def test_the_recipe_of_the_large_model_is_good() -> None:
    run = RlConfig.from_toml(RECIPES / "glm52-5layer-grpo-lora.toml")
    assert run.rl.replay == "both" and run.lora is not None
    assert {path.name for path in RECIPES.glob("*grpo*.toml")} == {
        "glm52-5layer-grpo-lora.toml",
        "tiny-grpo-warmup.toml",
        "tiny-grpo.toml",
    }


def test_a_folder_of_somebody_else_is_left_alone(glm5: Glm5, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    result = glm5("demo", tmp_path, "--rl")
    assert result.exit_code == 2 and "not a demo" in result.err


def test_a_model_that_does_not_learn_fails_it() -> None:
    flat = [{"reward": 0.1, "gap_abs_diff": 1e-7}] * 10
    assert [check.ok for check in demo_rl._check_learning(flat)] == [True, False, True]
    steep = [{"reward": r, "gap_abs_diff": 1e-4} for r in (0.3, 0.3, *[0.9] * 6)]
    assert [check.ok for check in demo_rl._check_learning(steep)] == [False, True, False]
