"""Applies a LoRA of Megatron-Bridge to the linears that are ours; it treats the others itself."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.bridge.peft.base import PEFT
from megatron.bridge.peft.lora import LoRA
from megatron.bridge.peft.utils import ParallelLinearAdapter, get_effective_lora_dim
from megatron.core import parallel_state
from torch import Tensor, nn

from glm5.errors import AdapterError
from glm5.integrations.bridge.adapters import BridgedLora, BridgedPair
from glm5.lora.dropout import LoraDropout, own_tokens, tokens_of_experts
from glm5.lora.experts import expert_pair
from glm5.lora.factors import linear_pair, split_of
from glm5.lora.seeds import seed_of
from glm5.lora.spec import ExpertLora, PairSpec
from glm5.model.experts import GroupedLinear
from glm5.model.linear import LatentUpProjection, ReplicatedLinear
from glm5.model.moe import Glm5Router
from glm5.model.names import GlobalNames, expert_name
from glm5.ops.grouped import MAX_RANK

# Linears that Megatron-Bridge does not know, or whose adapter it computes wrongly.
OURS = (ReplicatedLinear, LatentUpProjection, GroupedLinear)
# Where modules are chosen by exclusion, Megatron-Bridge takes linears of types that it knows.
_KNOWN_LINEAR = nn.Linear(1, 1, device="meta")


def expert_lora_of(lora: LoRA) -> ExpertLora:
    """Which adapters its two flags mean for the routed experts.

    share_expert_adapters is set unless somebody unsets it, and one adapter for all experts of a
    rank would depend on the layout: by itself it is taken as per_expert.

    Raises:
        AdapterError: everything is to be shared, and only the outer factors.
    """
    if not lora.experts_shared_outer_loras:
        return "per_expert"
    if lora.share_expert_adapters:
        raise AdapterError(
            "the flags for adapters of experts contradict each other",
            got="share_expert_adapters = True and experts_shared_outer_loras = True",
            expected="at most one of them: share whole adapters, or their outer factors",
            remedy="set share_expert_adapters = False for shared outer factors",
        )
    return "shared_outer"


class TransformOurs:
    """The `transform` of a PEFT method, which leaves our linears to us."""

    def __init__(self, model: Any, peft: PEFT) -> None:
        self._peft = peft
        self._config = model.config
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._global_name = GlobalNames(model)
        seed = [int(torch.randint(2**62, ()))]
        # what is drawn must not depend on the rank that draws it
        dist.broadcast_object_list(seed, src=0)
        self._seed = seed[0]

    def __call__(
        self, module: nn.Module, name: str | None = None, prefix: str | None = None
    ) -> nn.Module:
        """The module that takes its place; one that has an adapter stays, as Megatron-Bridge's."""
        if isinstance(module, BridgedLora):
            return module
        if not isinstance(module, (*OURS, Glm5Router)):
            return self._peft.transform(module, name, prefix)
        known = _KNOWN_LINEAR if isinstance(module, OURS) else module
        if self._peft.match(known, name, prefix) is None:
            return module
        path = self._paths[id(module)]
        if isinstance(module, Glm5Router) or not isinstance(self._peft, LoRA):
            raise AdapterError(
                f"{type(self._peft).__name__} of Megatron-Bridge cannot adapt {path}",
                got=type(module).__name__,
                expected="LoRA, on a linear",
                remedy="use megatron.bridge.peft.lora.LoRA, without the router among its targets",
            )
        self._check_learns(path)
        return self._adapt(module, path, self._peft)

    def _check_learns(self, path: str) -> None:
        if ".indexer." in path and not self._config.indexer_loss_coeff:
            raise AdapterError(
                f"an adapter on {path} trains nothing",
                got="indexer_loss_coeff = 0",
                expected="a weight of the indexer's loss, which alone reaches the indexer",
                remedy="set provider.indexer_loss_coeff, or leave the indexer's linears out: "
                "exclude_modules takes '*.indexer.*'",
            )

    def _adapt(self, base: Any, path: str, lora: LoRA) -> BridgedLora:
        stacked = isinstance(base, GroupedLinear)
        dim = get_effective_lora_dim(
            base, dim=lora.dim, normalize_moe_lora=lora.normalize_moe_lora, is_expert=stacked
        )
        _check(lora, base, path, dim)
        spec = PairSpec(dim, lora.alpha / dim)
        if stacked:
            outer = expert_lora_of(lora) == "shared_outer"
            pair: Any = expert_pair(spec, base, 1, shares_outer=outer)
        else:
            pair = linear_pair(spec, base, 1)
        adapter = BridgedPair(pair, split_of(base), dim=dim, alpha=lora.alpha)
        self._draw(adapter, base, path, lora.lora_A_init_method)
        _sum_parts(adapter, base)
        return BridgedLora(base, adapter, _dropout(lora, base))

    @torch.no_grad()
    def _draw(self, adapter: BridgedPair, base: Any, path: str, method: str) -> None:
        """A from its global name, so that it is the same in every layout; B is zero."""
        a = adapter.linear_in.weight
        if a.dim() == 2:
            self._draw_a(a, self._global_name(path), adapter, base, method)
            return
        for expert, own in enumerate(a):
            name = self._global_name(expert_name(path, expert))
            self._draw_a(own, name, adapter, base, method)

    def _draw_a(self, a: Tensor, name: str, adapter: BridgedPair, base: Any, method: str) -> None:
        part, parts = 0, 1
        if adapter.input_is_parallel:
            group = base.groups.expt_tp if isinstance(base, GroupedLinear) else None
            group = group or parallel_state.get_tensor_model_parallel_group()
            part, parts = group.rank(), group.size()
        values = torch.empty(a.shape[0], a.shape[1] * parts)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed_of(self._seed, name))
            ParallelLinearAdapter._get_init_fn(adapter, method)(values)
        a.copy_(values.chunk(parts, dim=1)[part])


def _check(lora: LoRA, base: nn.Module, path: str, dim: int) -> None:
    problems: list[tuple[str, object, str]] = []
    if not isinstance(dim, int) or dim < 1:
        problems.append(("dim", dim, "at least 1, a whole number"))
    if lora.alpha <= 0:
        problems.append(("alpha", lora.alpha, "above 0"))
    if not 0 <= lora.dropout < 1:
        problems.append(("dropout", lora.dropout, "from 0 to below 1"))
    if lora.lora_B_init_method != "zero":
        problems.append(("lora_B_init_method", lora.lora_B_init_method, "'zero'"))
    if lora.lora_dtype not in (None, base.weight.dtype):
        problems.append(("lora_dtype", lora.lora_dtype, "None: the dtype of the model"))
    if lora.dropout and lora.dropout_position != "pre":
        problems.append(("dropout_position", lora.dropout_position, "'pre'"))
    if lora.dropout and isinstance(base, LatentUpProjection):
        problems.append(("dropout", lora.dropout, "0: absorbed attention sees a key once"))
    if isinstance(base, GroupedLinear) and dim > MAX_RANK:
        problems.append(("dim", dim, f"at most {MAX_RANK} for routed experts"))
    if problems:
        name, value, expected = problems[0]
        raise AdapterError(
            f"this LoRA of Megatron-Bridge cannot be computed for {path}",
            got=f"{name} = {value}",
            expected=f"{name} = {expected}",
            remedy=f"change {name}, or leave the linear out of target_modules",
        )


def _dropout(lora: LoRA, base: Any) -> LoraDropout | None:
    if not lora.dropout:
        return None
    # ranks that share the outputs of an expert have the same inputs
    shares = isinstance(base, GroupedLinear) and base.split == "column"
    return LoraDropout(lora.dropout, tokens_of_experts() if shares else own_tokens())


def _sum_parts(adapter: BridgedPair, base: Any) -> None:
    """Of a cut expert's whole factor every rank makes a part of the gradient.

    Megatron sums such parts over tensor-parallel ranks alone, which for experts are other ranks;
    a shared factor is summed over all ranks.
    """
    if not isinstance(base, GroupedLinear) or base.groups.expt_tp.size() == 1:
        return
    whole = adapter.linear_in if base.split == "column" else adapter.linear_out
    if whole.weight.dim() == 3:
        group = base.groups.expt_tp

        def summed(grad: Tensor) -> Tensor:
            grad = grad.contiguous()
            dist.all_reduce(grad, group=group)
            return grad

        whole.weight.register_hook(summed)
