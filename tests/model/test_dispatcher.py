"""Our all-to-all dispatcher against Megatron's: the same layer, the sums of rows done exactly."""

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor

from glm5.checkpoint.load import load_model
from glm5.model.dispatcher import Glm5TokenDispatcher
from glm5.model.moe import Glm5MoELayer
from glm5.model.transformer_config import Glm5TransformerConfig
from glm5.runtime.distributed import Layout
from tests.model.dispatching import dispatcher, moe_layer, ours_and_megatrons, run
from tests.parallel.processes import run_ranks
from tests.tiny_models import TinyFolder, assert_all_close, assert_close, modules_of

pytestmark = pytest.mark.cores


@pytest.mark.parametrize("rows", [(23, 1), (7, 2), (1, 1)], ids=str)
def test_equals_megatrons(tiny_folder: TinyFolder, rows: tuple[int, ...]) -> None:
    ours, theirs = (
        run(moe_layer(tiny_folder("5"), make), rows)
        for make in (Glm5TokenDispatcher, MoEAlltoAllTokenDispatcher)
    )
    assert {"x", "output", "router.weight", "experts.linear_fc1.weight"} <= ours.keys()
    assert_all_close(ours, theirs)


@pytest.mark.parametrize("layout", [Layout(ep=2), Layout(etp=2)], ids=str)
def test_equals_megatrons_between_ranks(
    tiny_folder: TinyFolder, tmp_path: Path, layout: Layout
) -> None:
    for ours, theirs in run_ranks(tmp_path, 2, ours_and_megatrons, tiny_folder("5"), layout):
        assert {"x", "output", "router.weight", "experts.linear_fc1.weight"} <= ours.keys()
        assert_all_close(ours, theirs)


def test_bf16_equals_megatrons_to_its_rounding(tiny_folder: TinyFolder) -> None:
    ours, theirs = (
        run(moe_layer(tiny_folder("5"), make, torch.bfloat16), (64, 1))
        for make in (Glm5TokenDispatcher, MoEAlltoAllTokenDispatcher)
    )
    for name in ("output", "x"):
        assert ours[name].dtype == torch.bfloat16
        assert_close(ours[name].float(), theirs[name].float(), 2e-2, name)


def test_recomputed_rows_give_the_same_gradients(tiny_folder: TinyFolder) -> None:
    layer = moe_layer(tiny_folder("5"), Glm5TokenDispatcher)
    kept = run(layer, (23, 1))
    layer.moe_layer_recompute = True
    assert_all_close(run(layer, (23, 1)), kept, limit=0)
    assert layer.token_dispatcher.places is None


def test_nothing_of_the_tokens_is_kept(tiny_folder: TinyFolder) -> None:
    layer = moe_layer(tiny_folder("5"), Glm5TokenDispatcher)
    run(layer, (23, 1))
    notes = vars(layer.token_dispatcher)
    assert notes["places"] is None
    kept = {name: x.numel() for name, x in notes.items() if isinstance(x, Tensor)}
    assert all(count <= layer.config.num_moe_experts for count in kept.values()), kept


def test_layers_with_the_all_to_all_have_it(
    tiny_folder: TinyFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = Glm5TransformerConfig.__post_init__

    def as_on_a_gpu(self: Glm5TransformerConfig) -> None:
        self.moe_token_dispatcher_type = "alltoall"
        finish(self)

    monkeypatch.setattr(Glm5TransformerConfig, "__post_init__", as_on_a_gpu)
    layers = [layer for _, layer in modules_of(load_model(tiny_folder("5")), Glm5MoELayer)]
    assert layers
    assert all(type(layer.token_dispatcher) is Glm5TokenDispatcher for layer in layers)


@pytest.mark.parametrize(
    "options",
    [
        {"moe_expert_capacity_factor": 1.0},
        {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True},
        {"moe_router_padding_for_quantization": True},
        {"moe_permute_fusion": True},
    ],
    ids=str,
)
def test_rows_that_would_be_dropped_or_padded_are_refused(
    tiny_folder: TinyFolder, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    layer = moe_layer(tiny_folder("5"), Glm5TokenDispatcher)
    # what Megatron makes of a fused permutation needs a GPU
    monkeypatch.setattr(MoEAlltoAllTokenDispatcher, "__init__", _keep_config)
    for name, value in options.items():
        monkeypatch.setattr(layer.config, name, value)
    with pytest.raises(AssertionError, match="rows"):
        dispatcher(layer, Glm5TokenDispatcher)


def _keep_config(self: MoEAlltoAllTokenDispatcher, *_: Any, config: Any, **__: Any) -> None:
    self.config = config


def test_shared_experts_are_refused(tiny_folder: TinyFolder) -> None:
    layer = moe_layer(tiny_folder("5"), Glm5TokenDispatcher)
    layer.token_dispatcher.shared_experts = layer.shared_experts
    with pytest.raises(AssertionError, match="shared experts"):
        layer(torch.randn(3, 1, layer.config.hidden_size))
