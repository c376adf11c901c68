"""Whole parameters that train beside an adapter: which, and what the checkpoint then holds."""

import re
from typing import Any

import pytest
import torch
from megatron.core.models.gpt import GPTModel

from glm5.checkpoint.ckpt_dir import LoraRecord
from glm5.checkpoint.glm5_rules import mtp_hf_names
from glm5.checkpoint.hf_layout import HfTensor, hf_tensors
from glm5.checkpoint.load import load_model
from glm5.checkpoint.trained import (
    KINDS,
    adapt,
    load_trained,
    sharded_trained,
    trained_modules,
)
from glm5.errors import AdapterError
from glm5.lora.attach import is_adapter
from glm5.model.forward import logits
from tests.tiny_models import TinyFolder, draw_tokens, gradients, probe_loss


def adapted(folder: Any, *train: str, **options: Any) -> GPTModel:
    model = load_model(folder, **options)
    lora = LoraRecord(rank=2, alpha=2.0, targets=["o_proj", "up_proj"], train=list(train))
    adapt([model], lora, seed=0)
    return model


def without_mtp(model: GPTModel) -> dict[str, HfTensor]:
    """The checkpoint's tensors that the model is built from."""
    glm5 = model.config.glm5
    left_out = set(mtp_hf_names(glm5))
    return {name: t for name, t in hf_tensors(glm5).items() if name not in left_out}


def unfrozen(model: GPTModel) -> set[str]:
    return {n for n, p in model.named_parameters() if p.requires_grad and not is_adapter(n)}


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_is_those_parameters_of_the_checkpoint(tiny_folder: TinyFolder, kind: str) -> None:
    model = adapted(tiny_folder("5.2"), kind)
    found = trained_modules(model)
    names = without_mtp(model)
    expected = {name for name in names if re.fullmatch(KINDS[kind], name)}
    assert expected and {name for name, t in found.items() if t.requires_grad} == expected
    assert all(tuple(found[name].shape) == names[name].shape for name in found)
    assert len(unfrozen(model)) == len(expected)
    # a router's bias is of the same module, which PEFT saves and loads as a whole
    beside = {n.replace("gate.weight", "gate.e_score_correction_bias") for n in expected}
    assert found.keys() == (expected | beside if kind == "router" else expected)


def test_no_vector_or_table_is_left_without_a_kind(tiny_folder: TinyFolder) -> None:
    model = adapted(tiny_folder("5.2"), *KINDS)
    left = [
        name
        for name in without_mtp(model)
        if name not in trained_modules(model) and not name.endswith("_proj.weight")
    ]
    assert all(".indexer." in n or n.endswith("kv_a_proj_with_mqa.weight") for n in left)


@pytest.mark.parametrize(
    ("pattern", "count"),
    [
        (r"layers\.[34]\.mlp\.gate\.weight", 2),
        (r"model\.layers\.\d+\.self_attn\.q_a_layernorm\.weight", 7),
        (r"norm\.weight", 1),
        (r"gate\.weight", 4),
    ],
)
def test_a_pattern_matches_names_or_their_endings(
    tiny_folder: TinyFolder, pattern: str, count: int
) -> None:
    assert len(unfrozen(adapted(tiny_folder("5.2"), pattern))) == count


@pytest.mark.parametrize(
    ("train", "said"),
    [
        (("routers",), "routers.*match no parameter"),
        (("router", r"layers\.0\.mlp\.gate\.weight"), "match no parameter"),
        ((r"self_attn\.q_a_proj\.weight",), "q_a_proj"),
        ((r"o_proj\.weight",), "o_proj"),
        ((r"experts\.\d+\.down_proj\.weight",), "down_proj"),
        ((r"indexer\.k_norm\.(weight|bias)",), "k_norm"),
        ((r"e_score_correction_bias",), "match no parameter"),
        ((r"model\.layers\.7\.enorm\.weight",), "match no parameter"),
        ((r"norms?\.weight|.*",), "cannot train whole"),
    ],
    ids=str,
)
def test_what_cannot_train_whole_is_an_error(
    tiny_folder: TinyFolder, train: tuple[str, ...], said: str
) -> None:
    with pytest.raises(AdapterError, match=f"(?s)cannot train whole.*{said}|{said}"):
        adapted(tiny_folder("5.2"), *train)


def test_the_mtp_layer_stays_frozen(tiny_folder: TinyFolder) -> None:
    model = adapted(tiny_folder("5"), "norms", "router", include_mtp=True)
    assert not any(p.requires_grad for p in model.mtp.parameters())


def test_gradients_reach_what_is_unfrozen_and_nothing_else(tiny_folder: TinyFolder) -> None:
    model = adapted(tiny_folder("5.2"), *KINDS).train()
    with torch.no_grad():
        bias = model.decoder.layers[3].mlp.router.expert_bias.clone()
    probe_loss(logits(model, draw_tokens(30))).backward()
    found = gradients(model)
    names = unfrozen(model)
    assert all(found[name].any() for name in names)
    assert found.keys() == names | {n for n, _ in model.named_parameters() if is_adapter(n)}
    # the published bias of the selection has no gradient, and nothing else moves it
    assert torch.equal(model.decoder.layers[3].mlp.router.expert_bias, bias)


def test_a_checkpoint_holds_adapters_and_what_is_unfrozen(tiny_folder: TinyFolder) -> None:
    model = adapted(tiny_folder("5"), "router", r"layers\.0\.input_layernorm\.weight")
    held = sharded_trained(model)
    assert held.keys() == {n for n, p in model.named_parameters() if p.requires_grad}
    assert {n for n in held if not is_adapter(n)} == unfrozen(model)
    router = model.decoder.layers[1].mlp.router.weight
    load_trained(model, {"decoder.layers.1.mlp.router.weight": torch.full_like(router, 3.0)})
    assert bool((router == 3.0).all())


def test_a_model_that_trains_in_full_has_no_modules_beside(tiny_folder: TinyFolder) -> None:
    model = load_model(tiny_folder("5"))
    assert trained_modules(model) == {}
    assert len(sharded_trained(model)) >= len(list(model.parameters()))
