"""Over ranks Megatron-Bridge converts the same bits, and its LoRA learns the same."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from glm5.checkpoint.megatron_io import load_sharded
from glm5.lora.attach import attach_lora
from glm5.runtime.distributed import Layout
from tests.bridge.jobs import OWN_LORA, fill, observe, whole_gradients
from tests.bridge.models import (
    TARGETS,
    assert_same_bits,
    bridged,
    make_lora,
    tensors_of,
)
from tests.bridge.test_conversion import without_mtp
from tests.parallel.bounds import bounds_of
from tests.parallel.processes import run_ranks
from tests.tiny_models import VARIANTS, TinyFolder, assert_all_close, assert_close

LAYOUTS = {
    "tp2": Layout(tp=2),
    "tp2etp2": Layout(tp=2, etp=2),
    "pp2": Layout(pp=2),
    "ep2": Layout(ep=2),
}
OUTER = {"share_expert_adapters": False, "experts_shared_outer_loras": True}
LORAS: list[dict[str, Any]] = [{}, OUTER]
Observed = Callable[[str], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def observed(tiny_folder: TinyFolder, tmp_path_factory: pytest.TempPathFactory) -> Observed:
    """observed(layout) -> what each rank found; "one" is a process alone."""
    known: dict[str, list[dict[str, Any]]] = {}
    folders = [tiny_folder(variant) for variant in VARIANTS]

    def get(name: str) -> list[dict[str, Any]]:
        if name not in known:
            layout = LAYOUTS.get(name, Layout())
            out_dir: Path = tmp_path_factory.mktemp(name)
            count = 1 if name == "one" else 2
            arguments = (folders, out_dir, layout, LORAS)
            preload = ["tests.bridge.jobs"]
            known[name] = run_ranks(
                out_dir / "results", count, observe, *arguments, preload=preload
            )
            for found in known[name]:
                found["saved"] = out_dir / "saved"
                found["out_dir"] = out_dir
        return known[name]

    return get


@pytest.mark.parametrize("name", LAYOUTS)
def test_round_trip_keeps_every_bit(tiny_folder: TinyFolder, observed: Observed, name: str) -> None:
    first = observed(name)[0]
    for variant, weights in zip(VARIANTS, first["weights"], strict=True):
        assert_same_bits(weights, without_mtp(tiny_folder(variant)))
    assert_same_bits(tensors_of(first["saved"]), without_mtp(tiny_folder(VARIANTS[0])))


@pytest.mark.parametrize("which", range(len(LORAS)), ids=["per_expert", "shared_outer"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_lora_gradients_are_those_of_one_process(observed: Observed, name: str, which: int) -> None:
    alone, ranks = observed("one"), observed(name)
    expected, limit = whole_gradients(alone, which), bounds_of(LAYOUTS[name]).gradients
    for target in TARGETS:
        factors = [grad for path, grad in expected.items() if f".{target}." in path]
        assert factors and all(float(grad.abs().max()) > 0 for grad in factors), target
    assert_all_close(whole_gradients(ranks, which), expected, limit=limit, floor=1e-2)
    losses = ranks[-1]["learned"][which]["losses"]
    assert losses == pytest.approx(alone[0]["learned"][which]["losses"], rel=1e-6)


@pytest.mark.parametrize("which", range(len(LORAS)), ids=["per_expert", "shared_outer"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_adapters_and_merged_weights_are_exported_whole(
    observed: Observed, name: str, which: int
) -> None:
    expected, got = (observed(n)[0]["learned"][which] for n in ("one", name))
    assert_same_bits(got["adapters"], expected["adapters"])
    assert got["merged"].keys() == expected["merged"].keys()
    for weight, tensor in expected["merged"].items():
        assert_close(got["merged"][weight], tensor, 1e-6, weight)


@pytest.mark.parametrize("which", range(len(LORAS)), ids=["per_expert", "shared_outer"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_checkpoint_of_an_adapted_model_is_read_by_one_process(
    tiny_folder: TinyFolder, observed: Observed, name: str, which: int
) -> None:
    """Every weight is written once, whichever rank holds it, and found under the same key."""
    _, (model,) = bridged(tiny_folder(VARIANTS[-1]), lora=make_lora(**LORAS[which]))
    fill(model)
    before = weights_of(model)
    read_into(model, observed(name)[0]["out_dir"] / str(which))
    assert_same_bits(weights_of(model), before)


@pytest.mark.parametrize("name", LAYOUTS)
def test_checkpoint_with_our_own_adapters_is_read_by_one_process(
    tiny_folder: TinyFolder, observed: Observed, name: str
) -> None:
    _, (model,) = bridged(tiny_folder(VARIANTS[-1]))
    attach_lora(model, OWN_LORA, seed=0)
    before = weights_of(model)
    read_into(model, observed(name)[0]["out_dir"] / "own")
    assert_same_bits(weights_of(model), before)


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def read_into(model: Any, folder: Path) -> None:
    """Empties the model, then fills it from a checkpoint."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    loaded = load_sharded(folder, model.sharded_state_dict())
    model.load_state_dict(loaded, strict=False)
    assert not any(parameter.isnan().any() for parameter in model.parameters())
