"""What memory and time follow from a layout, and the run file that comes out."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from glm5.errors import ConfigError
from glm5.plan.arithmetic import _mean_keys
from glm5.plan.hardware import GIB
from glm5.plan.layouts import place, smallest_world
from glm5.plan.memory import moments, stage_elements
from glm5.plan.models import published_name, read_model
from glm5.plan.planner import Candidate, best, best_recompute, candidates, evaluate
from glm5.plan.recipe import recipe
from glm5.plan.workload import Workload
from glm5.runtime.distributed import Layout
from glm5.train.run_config import RunConfig
from glm5.train.trainable import parallel_layout
from tests.tiny_models import TinyFolder

NAME, GLM52 = read_model("GLM-5.2")
LORA, FULL = Workload(), Workload(mode="full")
FLOAT8 = Workload(base_weights="fp8")
EXPERTS = Workload(targets=("o_proj", "up_proj"), expert_lora="shared_outer")


def on(work: Workload = LORA, **sizes: int) -> Candidate:
    layout = Layout(**sizes)
    return evaluate(GLM52, place(GLM52, layout, smallest_world(layout)), work)


def test_weights_gradients_and_optimizer_of_full_training() -> None:
    """18 bytes a weight: bf16, and in fp32 its gradient, its copy and two moments."""
    memory = on(FULL).stages[0].memory
    assert memory.weights == 2 * 743_377_000_704
    assert (memory.gradients, memory.optimizer) == (2 * memory.weights, 6 * memory.weights)


@pytest.mark.parametrize("ep", [1, 2])
def test_experts_that_are_shared_out_have_an_optimizer_of_their_own(ep: int) -> None:
    """It steps after the other one; so short a row has no activations to speak of."""
    work = replace(FULL, seq_len=2)
    figures = on(work, ep=ep).stages[0]
    held = stage_elements(GLM52, figures.stage, Layout(ep=ep), work)
    # two ranks share what is not an expert's
    dense = (held.trained - held.experts) // ep
    together = held.trained if ep == 1 else max(held.experts, dense)
    assert figures.memory.transient + figures.memory.activations == 4 * together


def test_float8_weights_fit_the_whole_model_into_a_node() -> None:
    work = replace(LORA, base_weights="fp8", seq_len=65536)
    plain = replace(work, base_weights="dtype")
    for sizes in ({"ep": 8, "cp": 8}, {"tp": 8, "ep": 8}):
        assert on(work, **sizes).fits(141) and not on(plain, **sizes).fits(141)
        # every pass reads half the bytes
        seconds = [on(w, **sizes).stages[0].seconds.products for w in (work, plain)]
        assert seconds[0] <= seconds[1]


def test_the_fullest_moment_is_one_of_those_that_are_told() -> None:
    layout = Layout(ep=8, cp=8)
    work, placed = replace(LORA, recompute="full"), place(GLM52, layout, 8)
    memory, stage = evaluate(GLM52, placed, work).stages[0].memory, on(work, ep=8, cp=8).stages[0]
    found = moments(GLM52, stage.stage, placed, work, kept=memory.activations)
    assert set(found) == {"layer", "optimizer step", "logits"}
    assert memory.transient == max(found.values())


def test_every_axis_takes_memory_off_a_gpu() -> None:
    whole = on()
    for sizes in ({"tp": 8}, {"ep": 8}, {"pp": 8}, {"cp": 8}):
        assert on(**sizes).peak < whole.peak
    assert on(ep=8).peak < whole.peak / 4


def test_recompute_trades_time_for_memory() -> None:
    found = [
        on(replace(LORA, recompute=name), pp=8, ep=8) for name in ("none", "selective", "full")
    ]
    assert found[0].peak > found[1].peak > found[2].peak
    assert found[0].tokens_per_second > found[2].tokens_per_second


def test_the_first_stage_keeps_the_most_micro_batches() -> None:
    first, *_, last = on(pp=8, ep=8).stages
    assert first.memory.activations > 4 * last.memory.activations / len(last.stage.layers)


def test_longer_rows_cost_memory_and_the_attention_stays_linear() -> None:
    short, long = on(pp=8, ep=8), on(replace(LORA, seq_len=32768), pp=8, ep=8)
    assert long.peak > short.peak
    times = [candidate.stages[3].seconds for candidate in (short, long)]
    assert times[1].attention == pytest.approx(4 * times[0].attention, rel=0.15)
    assert times[1].indexer == pytest.approx(16 * times[0].indexer, rel=0.01)


def test_mean_keys_is_the_mean() -> None:
    for seq_len in (1, 5, 8, 9, 40):
        mean = sum(min(i, 8) for i in range(1, seq_len + 1)) / seq_len
        assert math.isclose(_mean_keys(seq_len, 8), mean, rel_tol=0.07)


def test_the_best_one_fits_and_is_the_fastest_that_does() -> None:
    found = candidates(GLM52, 32, LORA, 141)
    chosen = best(found, 141)
    assert chosen is not None and chosen.fits(141)
    fitting = [candidate for candidate in found if candidate.fits(141)]
    assert chosen.tokens_per_second == max(c.tokens_per_second for c in fitting)
    assert len(fitting) < len(found)
    assert best(candidates(GLM52, 8, LORA, 141), 141) is None


def test_recompute_is_taken_only_where_it_is_needed() -> None:
    placed = place(GLM52, Layout(pp=4, ep=8), 32)
    roomy = best_recompute(GLM52, placed, LORA, 10_000)
    assert roomy.work.recompute == "none"
    tight = best_recompute(GLM52, placed, LORA, roomy.needed / GIB - 1)
    assert tight.work.recompute != "none" and tight.needed < roomy.needed


def test_the_optimizer_is_shared_by_the_ranks_with_the_same_weights() -> None:
    """On 32 GPUs at pp 4 and ep 8 every expert is on one rank, and all else on eight."""
    placed = place(GLM52, Layout(pp=4, ep=8), 32)
    figures = evaluate(GLM52, placed, FULL).stages[1]
    held = stage_elements(GLM52, figures.stage, placed.layout, FULL)
    shared = (held.trained - held.experts) // 8
    assert figures.memory.optimizer == 12 * (held.experts + shared)
    assert figures.memory.gradients == 4 * held.trained


def test_interleaving_shortens_the_idle_time() -> None:
    plain, interleaved = on(pp=4, ep=8), on(pp=4, vpp=2, ep=8)
    assert interleaved.tokens_per_second > plain.tokens_per_second
    assert interleaved.stages[0].memory.activations > plain.stages[0].memory.activations


@pytest.mark.parametrize("work", [LORA, FULL, EXPERTS, FLOAT8])
def test_the_recipe_is_a_run_file_of_that_layout(tmp_path: Path, work: Workload) -> None:
    placed = place(GLM52, Layout(pp=8, ep=32), 256)
    path = tmp_path / "run.toml"
    path.write_text(recipe(NAME, evaluate(GLM52, placed, work)))
    run = RunConfig.from_toml(path)
    assert run.model.path == "zai-org/GLM-5.2" and run.model.recompute == work.recompute
    assert run.model.base_weights == work.base_weights
    assert parallel_layout(run) == placed.layout
    assert run.layout.layers_per_stage == placed.layers_per_stage
    assert (run.lora is None) == (work.mode == "full")
    if run.lora is not None:
        assert (run.lora.targets, run.lora.expert_lora) == (work.targets, work.expert_lora)
    assert run.indexer_loss_coeff == work.indexer_loss_coeff
    assert run.train.global_batch_size % placed.dp == 0


def test_models_are_found_by_name_file_and_folder(tiny_folder: TinyFolder) -> None:
    assert published_name("zai-org/glm-5.1-fp8") == "GLM-5.1-FP8"
    assert published_name("GLM-5.3-Flash") is None
    assert read_model("glm-5")[0] == "zai-org/GLM-5"
    assert read_model("GLM-5.3")[1].fp8 is not None and GLM52.fp8 is None
    folder = tiny_folder("5.2")
    for model in (folder, folder / "config.json"):
        path, glm5 = read_model(str(model))
        assert path == str(folder) and glm5.num_hidden_layers == 7
    with pytest.raises(ConfigError):
        read_model(str(folder / "model.safetensors.index.json"))
