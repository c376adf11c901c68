"""Stacked experts compute what a loop over experts computes, wait for nothing, and are named."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import apply_factories
from torch import Tensor

import glm5.model.experts as module
from glm5.checkpoint.convert import mcore_tensors, partition_dim
from glm5.checkpoint.load import load_model
from glm5.model.grouped_experts import GroupedExperts
from glm5.model.names import by_expert
from tests.tiny_models import TinyFolder, assert_close

EXPERTS, HIDDEN, WIDTH = 4, 16, 6


class Group:
    """A process group as far as shapes and shards depend on it."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = lambda: rank
        self.size = lambda: size


def make(
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    ep: Group | None = None,
    etp: Group | None = None,
) -> GroupedExperts:
    ep, etp = ep or Group(), etp or Group()
    config: Any = SimpleNamespace(
        hidden_size=HIDDEN,
        moe_ffn_hidden_size=WIDTH,
        params_dtype=dtype,
        init_model_with_meta_device=device == "meta",
        use_cpu_initialization=True,
        expert_model_parallel_size=ep.size(),
        expert_tensor_parallel_size=etp.size(),
        tensor_model_parallel_size=1,
        base_weights="dtype",
    )
    groups: Any = SimpleNamespace(ep=ep, expt_tp=etp, expt_dp=Group())
    experts = GroupedExperts(EXPERTS // ep.size(), config, pg_collection=groups)
    generator = torch.Generator().manual_seed(0)
    for parameter in experts.parameters():
        if device != "meta":
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.data.copy_(drawn / parameter.shape[-1] ** 0.5)
    return experts


def inputs(counts: list[int], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Tokens and their routers' weights, which are fp32 in every dtype."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(sum(counts), HIDDEN, generator=generator).to(dtype).requires_grad_()
    return x, torch.rand(sum(counts), generator=generator).requires_grad_()


def one_by_one(experts: GroupedExperts, x: Tensor, counts: list[int], probs: Tensor) -> Tensor:
    """Each expert's MLP as Megatron computes it."""
    parts = []
    fc1, fc2 = experts.linear_fc1.weight, experts.linear_fc2.weight
    for expert, (tokens, p) in enumerate(zip(x.split(counts), probs.split(counts), strict=True)):
        gate, up = F.linear(tokens, fc1[expert]).chunk(2, dim=-1)
        inner = ((F.silu(gate) * up) * p.unsqueeze(-1)).to(x.dtype)
        parts.append(F.linear(inner, fc2[expert]))
    return torch.cat(parts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", [[3, 1, 4, 2], [0, 5, 0, 1], [0, 0, 0, 7]], ids=str)
def test_equals_a_loop_over_experts(counts: list[int], dtype: torch.dtype) -> None:
    experts = make(dtype=dtype)
    x, probs = inputs(counts, dtype)
    leaves = [x, probs, *experts.parameters()]
    got, bias = experts(x, torch.tensor(counts), probs)
    expected = one_by_one(experts, x, counts, probs)
    assert bias is None and got.dtype == dtype
    limit = 1e-5 if dtype == torch.float32 else 1e-2
    assert_close(got, expected, limit)
    grad = torch.randn(got.shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    for ours, theirs in zip(
        torch.autograd.grad(got, leaves, grad),
        torch.autograd.grad(expected, leaves, grad),
        strict=True,
    ):
        assert ours.dtype == theirs.dtype
        assert_close(ours.float(), theirs.float(), limit)


def test_a_rank_without_tokens_has_gradients_of_zeros() -> None:
    """Its peers in data parallelism wait for them."""
    experts = make()
    x, probs = inputs([0] * EXPERTS)
    y, _ = experts(x, torch.zeros(EXPERTS, dtype=torch.long), probs)
    assert y.shape == (0, HIDDEN)
    y.sum().backward()
    for parameter in experts.parameters():
        assert parameter.grad is not None and not parameter.grad.any()


def test_the_host_reads_nothing_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors on the meta device have nothing to read."""

    def no_loop(x: Tensor, weight: Tensor, ends: Tensor, *rest: Any) -> Tensor:
        assert ends.dtype == torch.int32 and ends.shape == (EXPERTS,)
        return x @ weight[0].T

    monkeypatch.setattr(module, "grouped_linear", no_loop)
    experts = make(device="meta")
    x, probs = torch.empty(9, HIDDEN, device="meta"), torch.empty(9, device="meta")
    y, _ = experts(x, torch.empty(EXPERTS, dtype=torch.long, device="meta"), probs)
    assert y.shape == x.shape


@pytest.mark.parametrize(
    ("ep", "etp", "own_ranks"), [(1, 1, False), (2, 1, True), (1, 2, True), (2, 2, True)]
)
def test_megatron_is_told_how_experts_are_cut(ep: int, etp: int, own_ranks: bool) -> None:
    experts = make(ep=Group(0, ep), etp=Group(0, etp))
    fc1, fc2 = experts.linear_fc1.weight, experts.linear_fc2.weight
    assert fc1.shape == (EXPERTS // ep, 2 * WIDTH // etp, HIDDEN)
    assert fc2.shape == (EXPERTS // ep, HIDDEN, WIDTH // etp)
    for weight, cut in ((fc1, 1), (fc2, 2)):
        assert weight.tensor_model_parallel and weight.partition_dim == cut
        assert weight.allreduce is not own_ranks
        for _, view in by_expert("decoder.layers.0.mlp.experts.linear_fc1.weight", weight):
            assert partition_dim(view) == cut - 1


def test_shards_of_all_ranks_are_every_expert_once() -> None:
    """Gate and up are cut by themselves: whole, gate is above up."""
    ep, etp, place = 2, 3, "decoder.layers.0.mlp."
    seen: dict[str, Tensor] = {}
    for rank in range(ep * etp):
        experts = make(ep=Group(rank // etp, ep), etp=Group(rank % etp, etp))
        state = experts.sharded_state_dict(f"{place}experts.")
        assert state.keys() == {f"{place}experts.linear_fc{i}.weight" for i in (1, 2)}
        apply_factories(state)
        fc1, fc2 = state.values()
        for shard in [*fc1, fc2]:
            whole = seen.setdefault(shard.key, torch.zeros(shard.global_shape))
            part = whole[shard.global_slice()]
            part += shard.data.new_ones(part.shape)
    assert {key: tuple(whole.shape) for key, whole in seen.items()} == {
        f"{place}experts.experts.linear_fc1.weight": (EXPERTS, 2 * WIDTH, HIDDEN),
        f"{place}experts.experts.linear_fc2.weight": (EXPERTS, HIDDEN, WIDTH),
    }
    assert all(bool((whole == 1).all()) for whole in seen.values())


def test_a_factory_merges_what_it_built() -> None:
    experts = make()
    factory = experts.linear_fc1.sharded_state_dict("x.")["x.weight"]
    shards = factory.build()
    assert len(shards) == 2 * EXPERTS and all(shard.data.is_contiguous() for shard in shards)
    merged = factory.merge_fn([shard.data for shard in shards])
    assert torch.equal(merged, experts.linear_fc1.weight)


def test_experts_are_named_one_by_one_and_can_be_written(tiny_folder: TinyFolder) -> None:
    model = load_model(tiny_folder("5"))
    stacked = model.decoder.layers[2].mlp.experts.linear_fc2.weight
    view = mcore_tensors(model)["decoder.layers.2.mlp.experts.local_experts.3.linear_fc2.weight"]
    assert torch.equal(view, stacked[3]) and not view.requires_grad
    view.fill_(7.0)
    assert bool((stacked[3] == 7.0).all()) and not bool((stacked[2] == 7.0).any())
