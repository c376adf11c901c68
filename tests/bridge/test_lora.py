"""LoRA on a model that Megatron-Bridge made: its own on our linears, and ours."""

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.bridge.peft.canonical_lora import CanonicalLoRA
from megatron.bridge.peft.dora import DoRA
from megatron.core.models.gpt import GPTModel

from glm5 import load_model, logits
from glm5.errors import AdapterError
from glm5.integrations.bridge.lora import expert_lora_of
from glm5.lora.attach import attach_lora
from glm5.lora.spec import LoraSpec
from glm5.lora.switch import without_adapters
from glm5.lora.targets import DEFAULT_TARGETS
from tests.bridge.models import (
    INDEXER_TARGETS,
    TARGETS,
    bridged,
    exported,
    make_lora,
    randomise,
    tensors_of,
)
from tests.tiny_models import (
    TinyFolder,
    assert_all_close,
    assert_close,
    draw_tokens,
    gradients,
    probe_loss,
)

OUTER = {"share_expert_adapters": False, "experts_shared_outer_loras": True}
FLAGS: list[dict[str, Any]] = [{}, OUTER]
TOKENS = draw_tokens(40)


def adapted(folder: Path, **options: Any) -> tuple[Any, GPTModel, Any]:
    """(AutoBridge, model with B != 0, its LoRA)."""
    lora = make_lora(**options)
    bridge, model = bridged(folder, lora=lora)
    randomise(model)
    return bridge, model[0], lora


@pytest.mark.parametrize("flags", FLAGS)
def test_merged_export_computes_what_the_adapters_do(
    tiny_folder: TinyFolder, tmp_path: Path, flags: dict[str, Any]
) -> None:
    bridge, model, _ = adapted(tiny_folder("5.2"), **flags)
    bridge.save_hf_pretrained([model], tmp_path / "merged", show_progress=False)
    with torch.no_grad():
        expected = logits(model.eval(), TOKENS)
        assert_close(logits(load_model(tmp_path / "merged"), TOKENS), expected, limit=1e-5)
        base = logits(load_model(tiny_folder("5.2")), TOKENS)
    assert float((expected - base).abs().max()) > 1


def test_each_target_alone_is_applied_and_merged(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    for target in TARGETS:
        bridge, model, _ = adapted(tiny_folder("5.2"), target_modules=[target])
        bridge.save_hf_pretrained([model], tmp_path / target, show_progress=False)
        merged = load_model(tmp_path / target)
        with torch.no_grad():
            assert_close(logits(merged, TOKENS), logits(model.eval(), TOKENS), 1e-5, target)
            base = logits(load_model(tiny_folder("5.2")), TOKENS)
            assert float((logits(model, TOKENS) - base).abs().max()) > 1e-2, target


@pytest.mark.parametrize("flags", FLAGS)
def test_adapters_are_exported_as_deltas_of_the_checkpoint_s_linears(
    tiny_folder: TinyFolder, flags: dict[str, Any]
) -> None:
    """delta W = alpha / dim * B A, against the merged weights."""
    bridge, model, _ = adapted(tiny_folder("5.2"), **flags)
    before, after = tensors_of(tiny_folder("5.2")), exported(bridge, [model])
    factors = dict(bridge.export_adapter_weights([model], cpu=True, show_progress=False))
    stems = {name.rsplit(".lora_", 1)[0] for name in factors}
    adapted_weights = {name for name in after if not torch.equal(after[name], before[name])}
    for name in adapted_weights:
        stem = name.removesuffix(".weight")
        a, b = (_factor(factors, stem, side) for side in ("A", "B"))
        assert_close(after[name] - before[name], 2 * b @ a, limit=1e-5, what=name)
    assert len(adapted_weights) == 7 * 5 + 3 * 3 + 4 * (8 * 3 + 3)
    assert stems <= {name.removesuffix(".weight") for name in adapted_weights} | {
        f"model.layers.{layer}.mlp.experts.{linear}"
        for layer in range(3, 7)
        for linear in ("gate_proj", "up_proj", "down_proj")
    }


def _factor(factors: dict[str, torch.Tensor], stem: str, side: str) -> torch.Tensor:
    """Of an expert its own, else the one that all experts of the layer share."""
    own = factors.get(f"{stem}.lora_{side}.weight")
    if own is not None:
        return own
    head, _, tail = stem.partition(".experts.")
    shared = factors[f"{head}.experts.{tail.split('.')[1]}.lora_{side}.weight"]
    return shared[0]


def test_switched_off_the_model_is_the_base(tiny_folder: TinyFolder) -> None:
    _, model, lora = adapted(tiny_folder("5.2"))
    with torch.no_grad():
        base = logits(load_model(tiny_folder("5.2")), TOKENS)
        with lora.disable_adapter([model]):
            assert torch.equal(logits(model.eval(), TOKENS), base)
        assert not torch.equal(logits(model, TOKENS), base)


def test_fresh_adapters_change_nothing_and_a_is_drawn(tiny_folder: TinyFolder) -> None:
    _, (model,) = bridged(tiny_folder("5.2"), lora=make_lora())
    with torch.no_grad():
        base = logits(load_model(tiny_folder("5.2")), TOKENS)
        assert torch.equal(logits(model.eval(), TOKENS), base)
    for name, factor in model.named_parameters():
        assert (".linear_in." not in name) or float(factor.std()) > 0.05, name


def test_gradients_are_those_of_merged_weights(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    """dL/dA = scale * B^T dL/dW and dL/dB = scale * dL/dW A^T, with dL/dW of the merged model."""
    bridge, model, _ = adapted(tiny_folder("5.2"))
    bridge.save_hf_pretrained([model], tmp_path / "merged", show_progress=False)
    merged = load_model(tmp_path / "merged").train()
    probe_loss(logits(merged, TOKENS)).backward()
    probe_loss(logits(model.train(), TOKENS)).backward()
    whole, parts = gradients(merged), dict(model.named_parameters())
    seen = 0
    for name, factor in parts.items():
        if not name.endswith(".adapter.linear_in.weight"):
            continue
        stem = name.removesuffix(".adapter.linear_in.weight")
        b, grad = parts[f"{stem}.adapter.linear_out.weight"], whole[f"{stem}.weight"]
        assert factor.grad is not None and b.grad is not None, name
        assert_close(factor.grad, 2 * b.detach().mT @ grad, limit=1e-4, what=name)
        assert_close(b.grad, 2 * grad @ factor.detach().mT, limit=1e-4, what=name)
        seen += 1
    assert seen == 7 * 5 + 3 * 2 + 4 * 4


def test_the_flags_of_grouped_experts() -> None:
    assert expert_lora_of(make_lora()) == "per_expert"
    assert expert_lora_of(make_lora(share_expert_adapters=False)) == "per_expert"
    assert expert_lora_of(make_lora(**OUTER)) == "shared_outer"
    with pytest.raises(AdapterError, match="contradict"):
        expert_lora_of(make_lora(experts_shared_outer_loras=True))


def test_a_second_application_changes_nothing(tiny_folder: TinyFolder) -> None:
    _, model, lora = adapted(tiny_folder("5"))
    before = dict(model.named_parameters())
    lora([model], training=True)
    after = dict(model.named_parameters())
    assert before.keys() == after.keys()
    assert all(after[name] is parameter for name, parameter in before.items())


def test_both_kinds_of_adapters_at_once_are_refused(tiny_folder: TinyFolder) -> None:
    _, model, _ = adapted(tiny_folder("5"))
    spec = LoraSpec(adapter_rank=3, adapter_alpha=6, targets=DEFAULT_TARGETS)
    with pytest.raises(AdapterError, match="no linear that can be adapted"):
        attach_lora(model, spec, seed=0)


def test_per_expert_is_what_a_plain_lora_gives(tiny_folder: TinyFolder) -> None:
    _, model, _ = adapted(tiny_folder("5"))
    shapes = {
        name.rpartition("experts.")[2]: tuple(p.shape)
        for name, p in model.decoder.layers[1].mlp.experts.named_parameters()
        if ".adapter." in name
    }
    assert shapes == {
        "linear_fc1.adapter.linear_in.weight": (8, 4, 64),
        "linear_fc1.adapter.linear_out.weight": (8, 64, 4),
        "linear_fc2.adapter.linear_in.weight": (8, 4, 32),
        "linear_fc2.adapter.linear_out.weight": (8, 64, 4),
    }


def test_by_exclusion_every_other_linear_is_adapted(tiny_folder: TinyFolder) -> None:
    excluded = ["output_layer", "*.indexer.*"]
    _, chosen, _ = adapted(tiny_folder("5"), target_modules=[], exclude_modules=excluded)
    _, named, _ = adapted(tiny_folder("5"))
    assert _trained(chosen) == _trained(named)


def _trained(model: GPTModel) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_contradicting_flags_raise_where_they_are_used(tiny_folder: TinyFolder) -> None:
    with pytest.raises(AdapterError, match="contradict"):
        bridged(tiny_folder("5"), lora=make_lora(experts_shared_outer_loras=True))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"dropout": 0.1}, "dropout"),
    ({"lora_B_init_method": "normal"}, "lora_B_init_method"),
    ({"lora_dtype": torch.bfloat16}, "lora_dtype"),
    ({"target_modules": ["linear_fc1"], "dim": 160}, "dim"),
    ({"target_modules": ["linear_kv_up_proj"], "dim": 0}, "dim = at least 1"),
    ({"dim": 4.0}, "a whole number"),
    ({"alpha": 0}, "alpha = above 0"),
    ({"target_modules": ["linear_q_down_proj"], "dropout": 1.5}, "from 0 to below 1"),
    ({"target_modules": [], "exclude_modules": ["output_layer"]}, r"takes '\*.indexer.\*'"),
    (
        {"target_modules": ["linear_q_down_proj"], "dropout": 0.1, "dropout_position": "post"},
        "post",
    ),
    ({"target_modules": ["router"]}, "cannot adapt"),
    ({"target_modules": list(INDEXER_TARGETS)}, "trains nothing"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=[row[1] for row in REFUSED])
def test_what_cannot_be_adapted_raises(
    tiny_folder: TinyFolder, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(AdapterError, match=message):
        bridged(tiny_folder("5"), lora=make_lora(**options))


@pytest.mark.parametrize("kind", [DoRA, CanonicalLoRA])
def test_other_methods_on_our_linears_raise(tiny_folder: TinyFolder, kind: type) -> None:
    with pytest.raises(AdapterError, match="cannot adapt"):
        bridged(tiny_folder("5"), lora=kind(target_modules=["linear_kv_up_proj"], dim=4, alpha=8))


def test_dropout_is_applied_in_training_alone(tiny_folder: TinyFolder) -> None:
    targets = ["linear_q_down_proj", "linear_fc2"]
    _, model, _ = adapted(tiny_folder("5"), target_modules=targets, dropout=0.5)
    _, plain, _ = adapted(tiny_folder("5"), target_modules=targets)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        other.data.copy_(one.data)
    with torch.no_grad():
        assert torch.equal(logits(model.eval(), TOKENS), logits(plain.eval(), TOKENS))
        assert not torch.equal(logits(model.train(), TOKENS), logits(plain.train(), TOKENS))


def test_indexer_adapters_learn_from_the_indexer_s_loss(tiny_folder: TinyFolder) -> None:
    lora = make_lora(target_modules=list(INDEXER_TARGETS))
    _, model = bridged(tiny_folder("5.2"), lora=lora, indexer_loss_coeff=0.5)
    randomise(model)
    probe_loss(logits(model[0].train(), TOKENS)).backward()
    for name, factor in model[0].named_parameters():
        assert (".adapter." not in name) or float(factor.grad.abs().max()) > 0, name


def test_checkpoints_of_adapters_name_base_and_factors(tiny_folder: TinyFolder) -> None:
    _, plain = bridged(tiny_folder("5.2"))
    _, model, _ = adapted(tiny_folder("5.2"))
    base, whole = plain[0].sharded_state_dict(), model.sharded_state_dict()
    assert set(base) <= set(whole)
    extra = {key for key in set(whole) - set(base) if not key.endswith("_extra_state")}
    assert extra == {
        name.replace(".to_wrap", "") for name, p in model.named_parameters() if p.requires_grad
    }


def test_our_own_lora_works_on_a_bridged_model(tiny_folder: TinyFolder) -> None:
    spec = LoraSpec(adapter_rank=3, adapter_alpha=6, targets=DEFAULT_TARGETS)
    own = load_model(tiny_folder("5.2"))
    bridge, (model,) = bridged(tiny_folder("5.2"))
    for one in (own, model):
        attach_lora(one, spec, seed=0)
        generator = torch.Generator().manual_seed(0)
        for name, factor in one.named_parameters():
            if name.endswith(".b"):
                torch.nn.init.normal_(factor, std=0.1, generator=generator)
        probe_loss(logits(one.train(), TOKENS)).backward()
    assert_all_close(gradients(model), gradients(own), limit=0)
    with pytest.raises(AdapterError, match="would leave out"):
        exported(bridge, [model])
    with pytest.raises(AdapterError, match="would leave out"):
        list(bridge.export_adapter_weights([model], cpu=True, show_progress=False))
    with without_adapters([model]):
        weights = exported(bridge, [model])
    before = tensors_of(tiny_folder("5.2"))
    assert all(torch.equal(weights[name], before[name]) for name in weights)
