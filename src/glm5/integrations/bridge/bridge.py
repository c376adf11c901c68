"""Converts between Hugging Face checkpoints and the models of `GLM5ModelProvider`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from megatron.bridge.models.conversion.model_bridge import (
    HFWeightTuple,
    MegatronModelBridge,
    MegatronWeightTuple,
    WeightConversionTask,
)
from megatron.bridge.models.conversion.peft_bridge import AdapterWeightConversionTask
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.utils import unwrap_model
from torch import Tensor

from glm5.checkpoint.convert import fill_targets, load_part
from glm5.checkpoint.fp8 import SCALE_SUFFIX
from glm5.checkpoint.glm5_rules import glm5_rules, mtp_hf_names
from glm5.checkpoint.hf_layout import check_hf_tensors
from glm5.checkpoint.rules import Rule, check_total
from glm5.config import Glm5Config
from glm5.errors import AdapterError, ConfigError
from glm5.integrations.bridge.mapping import FactorMapping, RuleMapping, RuleRegistry
from glm5.integrations.bridge.plan import Step, conversion_steps, grouped_name
from glm5.integrations.bridge.provider import GLM5ModelProvider, provider_of
from glm5.integrations.bridge.source import open_source, read_config
from glm5.integrations.bridge.tensors import Held, held_tensors
from glm5.lora.attach import adapted_modules


class GLM5Bridge(MegatronModelBridge):
    """The GLM-5 family for `AutoBridge`: our provider, our modules, and our rules.

    A checkpoint and a model must fit exactly: a tensor that is missing or left over raises.
    """

    def __init__(self) -> None:
        super().__init__()
        self._glm5: Glm5Config | None = None

    @property
    def glm5(self) -> Glm5Config:
        """The configuration of the model or checkpoint that was last worked on."""
        if self._glm5 is None:
            self._glm5 = read_config(self.hf_config)
        return self._glm5

    @property
    def ADDITIONAL_FILE_PATTERNS(self) -> list[str]:
        """Files that an export takes from the source as they are.

        transformers' copy of config.json lacks keys. That of an FP8 checkpoint does not describe
        the weights that are written.
        """
        return ["config.json"] if self.glm5.fp8 is None else []

    def provider_bridge(self, hf_pretrained: Any) -> GLM5ModelProvider:
        """The provider of what `hf_pretrained` opened, from its raw config.json."""
        self._glm5 = read_config(hf_pretrained)
        return provider_of(self._glm5)

    @classmethod
    def megatron_to_hf_config(cls, provider: GLM5ModelProvider) -> dict[str, Any]:
        """The config.json of the provider's model, without quantisation."""
        return provider.glm5.model_copy(update={"fp8": None}).to_hf_dict()

    def mapping_registry(self) -> RuleRegistry:
        """Every tensor of the model, the MTP layers' too, generated from the conversion rules."""
        rules = glm5_rules(self.glm5, include_mtp=True)
        return RuleRegistry(self._steps(rules), rules)

    def load_weights_hf_to_megatron(
        self,
        hf_pretrained: Any,
        megatron_model: Any,
        allowed_mismatched_params: Sequence[str] | None = None,
    ) -> list[GPTModel]:
        """Fills this rank's part of every tensor, reading no other bytes; collective.

        FP8 weights are dequantised. In the checkpoint's dtype nothing is rounded.

        Raises:
            CheckpointError: a source or target is missing, extra, or of another shape.
            ConfigError: tensors were to be left unfilled, or are not where they can be filled.
        """
        _check_load(megatron_model, allowed_mismatched_params)
        chunks = _unwrapped(megatron_model)
        config, source = chunks[0].config, read_config(hf_pretrained)
        targets = {name: held.tensor for name, held in held_tensors(chunks).items()}
        with closing(open_source(hf_pretrained, source)) as reader:
            check_hf_tensors(reader, source)
            rules = _rules(config)
            check_total(
                rules, _used(reader.names(), config), list(_on_all_ranks(dict.fromkeys(targets)))
            )
            exact = config.params_dtype == getattr(torch, source.dtype)
            fill_targets(targets, rules, reader, exact=exact)
        return _as_list(megatron_model)

    def stream_weights_hf_to_megatron(
        self,
        hf_pretrained: Any,
        megatron_model: Any,
        conversion_tasks: Sequence[WeightConversionTask] | None = None,
    ) -> Iterator[MegatronWeightTuple]:
        """This rank's parts, one at a time and with nothing filled; FP8 is dequantised."""
        if conversion_tasks is None:
            conversion_tasks = self.build_conversion_tasks(hf_pretrained, megatron_model)
        ep_rank = parallel_state.get_expert_model_parallel_rank()
        with closing(open_source(hf_pretrained, read_config(hf_pretrained))) as reader:
            for task in conversion_tasks:
                if task.param_weight is None:
                    continue
                rule = task.mapping.step.rule_of(ep_rank)
                part = load_part(rule, reader, task.param_weight)
                yield MegatronWeightTuple(task.param_name, part, task.vp_stage)

    def stream_weights_megatron_to_hf(
        self, megatron_model: Any, hf_pretrained: Any, *args: Any, **options: Any
    ) -> Iterator[HFWeightTuple]:
        """Whole Hugging Face tensors on every rank, Megatron-Bridge's adapters merged; collective.

        Raises:
            AdapterError: the model carries glm5's own adapters, which this would leave out.
            CheckpointError: model and checkpoint do not have the same tensors.
        """
        _check_no_own_adapters(_unwrapped(megatron_model))
        return super().stream_weights_megatron_to_hf(
            megatron_model, hf_pretrained, *args, **options
        )

    def stream_weights_megatron_to_hf_quant(self, *args: Any, **options: Any) -> NoReturn:
        """Nothing is quantised on the way out."""
        del args, options
        raise ConfigError(
            "export_hf_weights_quant is not supported",
            got="a function that quantises",
            expected="export_hf_weights, which gives whole tensors",
            remedy="quantise the tensors that export_hf_weights gives",
        )

    def build_conversion_tasks(
        self,
        hf_pretrained: Any,
        megatron_model: Any,
        weight_dtype: torch.dtype | None = None,
    ) -> list[WeightConversionTask]:
        """One task for each step of the conversion, in the same order on every rank; collective.

        Raises:
            CheckpointError: the model or, where there is one, the checkpoint has other tensors than
            the rules.
        """
        self.hf_pretrained = hf_pretrained
        self.hf_config = getattr(hf_pretrained, "config", hf_pretrained)
        chunks = _unwrapped(megatron_model)
        config = chunks[0].config
        self._glm5 = config.glm5
        rules, held = _rules(config), held_tensors(chunks)
        wrapped = _on_all_ranks({name: found.wrapped for name, found in held.items()})
        sources = [name for rule in rules for name in rule.hf_names]
        if (state := getattr(hf_pretrained, "state", None)) is not None:
            sources = _used(state.source.get_all_keys(), config)
        check_total(rules, sources, list(wrapped))
        groups = chunks[0].pg_collection
        return [_task(step, held, wrapped, groups, weight_dtype) for step in self._steps(rules)]

    def build_export_fp8_tasks(self, *args: Any, **options: Any) -> NoReturn:
        """Our weights are not FP8."""
        del args, options
        raise ConfigError(
            "unsupported export_weight_dtype",
            got="fp8",
            expected="bf16",
            remedy="leave it out, and quantise the exported folder",
        )

    def build_adapter_conversion_tasks(
        self, megatron_model: Any, exclude_adapter_base_prefixes: Iterable[str] | None = None
    ) -> dict[str, list[AdapterWeightConversionTask]]:
        """Megatron-Bridge's tasks, which learn from each factor how it is cut.

        Raises AdapterError where the model carries glm5's own adapters, which would be left out.
        """
        _check_no_own_adapters(_unwrapped(megatron_model))
        self._glm5 = _unwrapped(megatron_model)[0].config.glm5
        by_base = super().build_adapter_conversion_tasks(
            megatron_model, exclude_adapter_base_prefixes
        )
        return {base: [_by_factor(task) for task in tasks] for base, tasks in by_base.items()}

    def _split_fused_fc1_linear_out_weight(
        self, linear_out_weight: Tensor, *, is_expert: bool
    ) -> tuple[Tensor, Tensor]:
        """B [tp * (gate_r + up_r), rank] of all ranks -> B of gate and of up, whole."""
        size = (
            parallel_state.get_expert_tensor_parallel_world_size()
            if is_expert
            else parallel_state.get_tensor_model_parallel_world_size()
        )
        halves = [part.chunk(2) for part in linear_out_weight.chunk(size)]
        return torch.cat([gate for gate, _ in halves]), torch.cat([up for _, up in halves])

    def _steps(self, rules: Iterable[Rule]) -> list[Step]:
        ranks = 1
        if parallel_state.model_parallel_is_initialized():
            ranks = parallel_state.get_expert_model_parallel_world_size()
        return conversion_steps(rules, self.glm5.n_routed_experts, ranks)


def _unwrapped(megatron_model: Any) -> list[GPTModel]:
    return _as_list(unwrap_model(megatron_model))


def _as_list(model: Any) -> list[Any]:
    return model if isinstance(model, list) else [model]


def _rules(config: Any) -> list[Rule]:
    """Of the tensors that a model with this config has."""
    return glm5_rules(config.glm5, include_mtp=bool(config.mtp_num_layers))


def _used(names: Iterable[str], config: Any) -> list[str]:
    """A checkpoint's tensors without scales, and without those of MTP layers that are not built."""
    unused = set() if config.mtp_num_layers else set(mtp_hf_names(config.glm5))
    return [name for name in names if name not in unused and not name.endswith(SCALE_SUFFIX)]


def _on_all_ranks(named: Mapping[str, Any]) -> dict[str, Any]:
    """With what the ranks hold that have the rest of the model."""
    everywhere: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everywhere, dict(named))
    return {name: value for found in everywhere for name, value in found.items()}


def _task(
    step: Step,
    held: Mapping[str, Held],
    wrapped: Mapping[str, bool],
    groups: Any,
    weight_dtype: torch.dtype | None,
) -> WeightConversionTask:
    mapping = RuleMapping(step)
    mapping.set_process_groups_from_pg_collection(groups)
    name = step.rules[0].mcore_name
    rule = step.rule_of(parallel_state.get_expert_model_parallel_rank())
    found = held.get(rule.mcore_name)
    shown = _shown_name(name, wrapped=wrapped[name])
    return WeightConversionTask(
        param_name=shown if found is None else found.local_name,
        global_param_name=shown,
        mapping=mapping,
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        vp_stage=None if found is None else found.chunk,
        megatron_module=None if found is None else found.module,
        param_weight=None if found is None else found.tensor,
        weight_dtype=weight_dtype,
    )


def _shown_name(name: str, *, wrapped: bool) -> str:
    """As Megatron-Bridge names a tensor; by it, it finds the adapter to merge."""
    module, _, leaf = grouped_name(name).rpartition(".")
    return f"{module}.to_wrap.{leaf}" if wrapped else f"{module}.{leaf}"


def _by_factor(task: AdapterWeightConversionTask) -> AdapterWeightConversionTask:
    def mapped(factor: WeightConversionTask) -> WeightConversionTask:
        old = factor.mapping
        return replace(factor, mapping=FactorMapping(old.megatron_param, old.hf_param))

    return replace(
        task,
        linear_in_task=mapped(task.linear_in_task),
        linear_out_task=mapped(task.linear_out_task),
        # which factors are stacks does not matter where each says how it is cut
        requires_expert_splits=False,
    )


def _check_load(megatron_model: Any, allowed_mismatched_params: Sequence[str] | None) -> None:
    if allowed_mismatched_params:
        raise ConfigError(
            "tensors that may stay unfilled are not supported",
            got=f"allowed_mismatched_params {list(allowed_mismatched_params)}",
            expected="a checkpoint of the model",
            remedy="leave allowed_mismatched_params out",
        )
    ddp_config = getattr(_as_list(megatron_model)[0], "ddp_config", None)
    if ddp_config is not None and ddp_config.use_megatron_fsdp:
        raise ConfigError(
            "Megatron-FSDP is not supported",
            got="use_megatron_fsdp = True",
            expected="Megatron's distributed data parallelism",
            remedy="set use_megatron_fsdp = False",
        )


def _check_no_own_adapters(chunks: Sequence[GPTModel]) -> None:
    found = [path for chunk in chunks for path, _ in adapted_modules(chunk)]
    if found:
        raise AdapterError(
            "an export would leave out the adapters of glm5.lora",
            got=f"adapters on {found[0]} and {len(found) - 1} more",
            expected="a model without adapters, or with those of Megatron-Bridge",
            remedy="save them with glm5.checkpoint, or export inside `without_adapters`",
        )
