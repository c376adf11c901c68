"""Our conversion rules as Megatron-Bridge's mappings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
from megatron.bridge.models.conversion.param_mapping import MegatronParamMapping
from torch import Tensor, nn

from glm5.checkpoint.convert import is_expert, partition_dim
from glm5.checkpoint.memory_reader import MemoryReader
from glm5.checkpoint.rules import Rule
from glm5.errors import CheckpointError
from glm5.integrations.bridge.plan import Step, expert_rule_name


class RuleMapping(MegatronParamMapping):
    """One step of the conversion, whatever rank holds its tensor or a part of it.

    The parameter itself says along which dimension tensor-parallel ranks cut it.
    """

    def __init__(self, step: Step) -> None:
        self.step = step
        names = step.hf_names
        super().__init__(
            step.rules[0].mcore_name,
            names[0] if len(names) == 1 else {name: name for name in names},
        )

    def resolve(self, captures: tuple[str, ...]) -> RuleMapping:
        """Names have no wildcards: another mapping of the same step."""
        del captures
        return RuleMapping(self.step)

    def hf_to_megatron(
        self, hf_weights: Tensor | Mapping[str, Tensor], megatron_module: nn.Module
    ) -> Tensor:
        """This rank's part of the Megatron tensor, from whole Hugging Face tensors."""
        if isinstance(hf_weights, Tensor):
            hf_weights = {self.step.hf_names[0]: hf_weights}
        _check_dequantised(hf_weights)
        rule = self.step.rule_of(self.ep_rank)
        dim = _cut_dim(megatron_module, rule)
        return rule.load(
            MemoryReader(dict(hf_weights)),
            tp_rank=self.tp_rank,
            tp_size=self.tp_size,
            partition_dim=dim,
        )

    def megatron_to_hf(
        self, megatron_weights: Tensor | None, megatron_module: nn.Module | None
    ) -> dict[str, Tensor]:
        """Whole Hugging Face tensors on every rank; collective."""
        shards = gather_parts(self, megatron_weights)
        dim = partition_dim(shards[0])
        tensors: dict[str, Tensor] = {}
        for rule, parts in zip(self.step.rules, self._by_rule(shards), strict=True):
            tensors |= zip(rule.hf_names, rule.join(parts, dim), strict=True)
        return tensors

    def _by_rule(self, shards: list[Tensor]) -> list[list[Tensor]]:
        """For each rule the parts of its tensor: those of another rank's expert come from there."""
        count = len(self.step.rules)
        if count == 1:
            return [shards]
        per_shard = []
        for shard in shards:
            everywhere = [torch.empty_like(shard) for _ in range(count)]
            dist.all_gather(everywhere, shard, group=self.ep_group)
            per_shard.append(everywhere)
        return [list(parts) for parts in zip(*per_shard, strict=True)]


class FactorMapping(MegatronParamMapping):
    """A factor of an adapter, made whole; the parameter says along which dimension it is cut."""

    def hf_to_megatron(self, hf_weights: Tensor, megatron_module: Any) -> Tensor:
        """This rank's part of the factor."""
        dim = partition_dim(megatron_module.weight)
        return hf_weights if dim is None else hf_weights.chunk(self.tp_size, dim)[self.tp_rank]

    def megatron_to_hf(
        self, megatron_weights: Tensor | None, megatron_module: nn.Module | None
    ) -> dict[str, Tensor]:
        """The whole factor under one name, on every rank; collective."""
        parts = gather_parts(self, megatron_weights)
        dim = partition_dim(parts[0])
        return {str(self.hf_param): parts[0] if dim is None else torch.cat(parts, dim)}


class RuleRegistry(MegatronMappingRegistry):
    """Finds the mapping of a tensor by its name, which is in the rules as it is."""

    def __init__(self, steps: Iterable[Step], rules: Iterable[Rule]) -> None:
        super().__init__(*(RuleMapping(step) for step in steps))
        self._rules = {rule.mcore_name: rule for rule in rules}
        self._steps = {mapping.megatron_param: mapping for mapping in self.mappings}
        self._by_hf = {name: m for m in self.mappings for name in m.step.hf_names}

    def megatron_to_hf_lookup(self, megatron_param_name: str) -> RuleMapping | None:
        """The step that starts with this tensor; `...experts.linear_fc1.weight5` is one expert."""
        name = expert_rule_name(megatron_param_name)
        if name == megatron_param_name and name in self._steps:
            return self._prepare_mapping(self._steps[name])
        if name not in self._rules:
            return None
        return self._prepare_mapping(RuleMapping(Step((self._rules[name],))))

    def hf_to_megatron_lookup(self, hf_param_name: str) -> RuleMapping | None:
        """The step that makes or takes this Hugging Face tensor."""
        found = self._by_hf.get(hf_param_name)
        return None if found is None else self._prepare_mapping(found)


def gather_parts(mapping: MegatronParamMapping, tensor: Tensor | None) -> list[Tensor]:
    """The tensor of the pipeline rank that has it, from each rank that it is cut over."""
    whole = mapping.broadcast_from_pp_rank(
        None if tensor is None else _plain(tensor), cache_key=mapping.megatron_param
    )
    dim = partition_dim(whole)
    if dim is None:
        return [whole]
    parts = mapping.gather_from_tp_ranks(whole)
    for part in parts:
        part.tensor_model_parallel, part.partition_dim = True, dim
    return parts


def _check_dequantised(hf_weights: Mapping[str, Tensor]) -> None:
    for name, tensor in hf_weights.items():
        if tensor.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
            raise CheckpointError(
                f"{name} is float8 without its scale",
                got=tensor.dtype,
                expected="a weight in bf16 or fp32",
                remedy="load with load_hf_weights, which dequantises",
            )


def _plain(tensor: Tensor) -> Tensor:
    """In one piece and without gradients; it still says how it is cut."""
    dim = partition_dim(tensor)
    plain: Any = tensor.detach().contiguous()
    if dim is not None:
        plain.tensor_model_parallel, plain.partition_dim = True, dim
    return plain


def _cut_dim(module: Any, rule: Rule) -> int | None:
    """Along which dimension ranks cut the rule's tensor; the module may hold a stack of those."""
    tensor: Tensor = getattr(module, rule.mcore_name.rpartition(".")[2])
    dim = partition_dim(tensor)
    return dim - 1 if dim is not None and is_expert(rule.mcore_name) else dim
