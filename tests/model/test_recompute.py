"""Recomputed activations give the gradients of kept ones, in flight, packed, shared, adapted."""

from collections.abc import Callable

import pytest
import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from glm5.bench.memory_tracker import MemoryTracker
from glm5.checkpoint.load import load_model
from glm5.lora.attach import adapter_pairs, attach_lora
from glm5.lora.spec import LoraSpec
from glm5.lora.targets import DEFAULT_TARGETS
from glm5.model.attention import DSASelfAttention
from glm5.model.forward import logits
from glm5.model.transformer_config import Recompute
from tests.tiny_models import (
    TinyFolder,
    assert_all_close,
    draw_tokens,
    edges,
    gradients,
    modules_of,
    probe_loss,
)

Forward = Callable[[GPTModel, int], Tensor]
RECOMPUTE = ("full", "selective")


def thd(model: GPTModel, seed: int) -> Tensor:
    return logits(model, draw_tokens(35, seed=seed), edges([25, 1, 9]))


def bshd(model: GPTModel, seed: int) -> Tensor:
    rows = draw_tokens(2 * 19, seed=seed).view(2, 19)
    return model(rows, torch.arange(19).expand_as(rows), attention_mask=None)


def train_step(model: GPTModel, forward: Forward) -> dict[str, Tensor]:
    """F1 F2 B1 B2: the second micro-batch's forward lies between the first's two."""
    model.train().zero_grad(set_to_none=True)
    losses = [probe_loss(forward(model, seed)) for seed in (1, 2)]
    for loss in losses:
        loss.backward()
    return gradients(model)


def adapt(model: GPTModel, targets: tuple[str, ...] = DEFAULT_TARGETS) -> GPTModel:
    """Adapters with B != 0, without which A has no gradient."""
    attach_lora(model, LoraSpec(adapter_rank=3, adapter_alpha=6, targets=targets), seed=0)
    generator = torch.Generator().manual_seed(1)
    for *_, pair in adapter_pairs(model):
        pair.b.data.copy_(0.1 * torch.randn(pair.b.shape, generator=generator))
    return model


@pytest.fixture(scope="module")
def expected(tiny_folder: TinyFolder) -> Callable[..., dict[str, Tensor]]:
    """The gradients without recompute, once for each question."""
    known: dict[tuple[str, Forward], dict[str, Tensor]] = {}

    def get(variant: str, forward: Forward) -> dict[str, Tensor]:
        if (variant, forward) not in known:
            known[variant, forward] = train_step(load_model(tiny_folder(variant)), forward)
        return known[variant, forward]

    return get


@pytest.mark.parametrize("forward", [thd, bshd])
@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("variant", ["5", "5.2"])
def test_gradients_are_the_same_bits(
    tiny_folder: TinyFolder,
    expected: Callable[..., dict[str, Tensor]],
    variant: str,
    recompute: str,
    forward: Forward,
) -> None:
    model = load_model(tiny_folder(variant), recompute=recompute)
    assert_all_close(train_step(model, forward), expected(variant, forward), limit=0)


@pytest.mark.parametrize("recompute", ["none", *RECOMPUTE])
def test_recompute_runs_what_it_says_twice(tiny_folder: TinyFolder, recompute: str) -> None:
    """Guards the test above: equal gradients prove nothing where nothing is recomputed."""
    model = load_model(tiny_folder("5.2"), recompute=recompute).train()
    calls = {"attention": 0, "core": 0, "mlp": 0}

    def count(name: str) -> Callable[..., None]:
        def hook(*_: object) -> None:
            calls[name] += 1

        return hook

    for layer in model.decoder.layers:
        layer.self_attention.register_forward_hook(count("attention"))
        mlp = layer.mlp
        (mlp.linear_fc1 if hasattr(mlp, "linear_fc1") else mlp.router).register_forward_hook(
            count("mlp")
        )
    attentions = [attention for _, attention in modules_of(model, DSASelfAttention)]
    for attention in attentions:
        core = attention._core
        attention._core = lambda *args, core=core: (count("core")(), core(*args))[1]
    thd(model, 0).sum().backward()
    twice = {"none": set(), "full": set(calls), "selective": {"core", "mlp"}}[recompute]
    assert calls == {name: 14 if name in twice else 7 for name in calls}


@pytest.mark.parametrize("forward", [thd, bshd])
@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_adapters_on_a_frozen_base_get_the_same_gradients(
    tiny_folder: TinyFolder, recompute: str, forward: Forward
) -> None:
    """The embedding is frozen, so nothing below the first adapter asks for a gradient by itself."""
    kept = train_step(adapt(load_model(tiny_folder("5.2"))), forward)
    assert any(name.startswith("decoder.layers.0.") for name in kept)
    # an expert may get no token, everything else is reached
    reached = {name for name, gradient in kept.items() if gradient.any()}
    assert all(name in reached or ".experts." in name for name in kept)
    model = adapt(load_model(tiny_folder("5.2"), recompute=recompute))
    # kv_b_proj is used on both sides of the core, and its two gradients may be added in any order
    assert_all_close(train_step(model, forward), kept)


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("target", ["q_a_proj", "kv_b_proj", "o_proj", "gate_proj", "down_proj"])
def test_one_kind_of_adapter_gets_the_same_gradients(
    tiny_folder: TinyFolder, recompute: str, target: str
) -> None:
    """In the first layer nothing but the adapter inside the recomputed part needs a gradient."""
    kept = train_step(adapt(load_model(tiny_folder("5")), (target,)), thd)
    model = adapt(load_model(tiny_folder("5"), recompute=recompute), (target,))
    assert_all_close(train_step(model, thd), kept)


@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_evaluation_recomputes_nothing(tiny_folder: TinyFolder, recompute: str) -> None:
    model = load_model(tiny_folder("5"), recompute=recompute)
    plain = load_model(tiny_folder("5"))
    assert torch.equal(thd(model, 0), thd(plain, 0))


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_no_activation_outlives_the_backward_pass(
    tiny_folder: TinyFolder, recompute: Recompute
) -> None:
    """Else what is left would grow with the tokens of the last micro-batch."""
    model, left = load_model(tiny_folder("5.2"), recompute=recompute).train(), []
    with MemoryTracker() as tracker:
        for length in (20, 60):
            model.zero_grad(set_to_none=True)
            probe_loss(logits(model, draw_tokens(length, seed=0), edges([length]))).backward()
            left.append(tracker.live)
    assert left[0] == left[1]
