"""Write an adapter as a PEFT folder that PEFT loads completely."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from torch import Tensor

from glm5.checkpoint.adapter import FactorSpec, LazyFactors, LoraAdapter, LoraFactors
from glm5.checkpoint.adapter_file import Progress, write_adapter_file
from glm5.checkpoint.adapter_fused import fuse_experts
from glm5.checkpoint.adapter_layout import (
    FusedWeight,
    adapter_linears,
    fused_weight,
    fused_width,
    peft_keys,
    peft_targets,
    peft_weights,
    weight_shapes,
)
from glm5.checkpoint.adapter_ranks import rank_settings
from glm5.checkpoint.adapter_settings import CONFIG_FILE
from glm5.checkpoint.adapter_valid import check_adapter, checked_pair
from glm5.checkpoint.atomic import new_folder
from glm5.checkpoint.safetensors_file import TensorSpec
from glm5.config import Glm5Config


def write_peft_adapter(
    folder: str | Path,
    adapter: LoraAdapter,
    *,
    config: Glm5Config,
    base_name: str,
    progress: Progress = lambda done, total: None,
) -> None:
    """Write the adapter as a folder that PEFT loads completely, in the factors' dtype.

    The folder describes exactly the adapted set:

    * attention and indexer linears are PEFT target_modules;
    * dense and shared-expert linears are target_parameters `<linear>.weight`, because PEFT drops
      them when they are named as modules;
    * routed experts are target_parameters `mlp.experts.gate_up_proj` and `mlp.experts.down_proj`,
      fused over the experts of a layer. PEFT has no shared factors: those of "shared_outer" are
      written once per expert. An expert, or one of gate and up, that is not adapted gets zero
      factors there, which leaves its weight unchanged; smaller ranks than the layer's largest end
      in zeros; where scales differ within one fused weight b is rescaled and rounded once;
    * whole modules are modules_to_save.

    Every other difference in rank or scale stands in rank_pattern and alpha_pattern, exactly. One
    fused matrix pair is in memory beside the adapter. The folder appears complete or not at all;
    `progress` hears of (tensors written, of how many).
    Raises AdapterError for whatever `check_adapter` and `checked_pair` refuse, and CheckpointError
    for a folder that already holds something.
    """
    linears = adapter_linears(config)
    specs = check_adapter(adapter, linears, config)
    checked = LazyFactors(
        specs, lambda path: checked_pair(path, adapter.factors[path], specs[path], linears[path])
    )
    writer = _PeftWriter(checked, specs, linears, config)
    modules = {f"base_model.model.{name}": tensor for name, tensor in adapter.modules.items()}
    plan = writer.plan() | {name: (tuple(t.shape), t.dtype) for name, t in modules.items()}
    with new_folder(folder) as staging:
        settings = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base_name,
            "inference_mode": True,
            "lora_dropout": 0.0,
            "bias": "none",
            **writer.settings(),
            "modules_to_save": _modules_to_save(adapter.modules) or None,
        }
        text = json.dumps(settings, indent=2) + "\n"
        (staging / CONFIG_FILE).write_text(text, encoding="utf-8")
        write_adapter_file(staging, plan, writer.tensors(modules), progress)


def _modules_to_save(names: Iterable[str]) -> list[str]:
    # in full: PEFT compares ends of names, where "norm" is also that of "k_norm"
    return list(dict.fromkeys(name.rpartition(".")[0] for name in names))


class _PeftWriter:
    """Everything about one adapter's folder, for its settings and its tensors."""

    def __init__(
        self,
        factors: LazyFactors,
        specs: Mapping[str, FactorSpec],
        linears: Mapping[str, tuple[int, int]],
        config: Glm5Config,
    ) -> None:
        self._factors = factors
        self._specs = specs
        self._linears = linears
        self._num_experts = config.n_routed_experts
        self._weights = peft_weights(specs)
        self._dtype = next(iter(specs.values())).dtype
        # (rank of one projection, scale) of each weight
        self._ranks = {weight: self._rank(weight) for weight in self._weights}

    def settings(self) -> dict[str, object]:
        """The part of adapter_config.json that depends on the adapter."""
        modules, parameters = peft_targets(self._weights, peft_weights(self._linears))
        return {
            "target_modules": modules,
            "target_parameters": parameters or None,
            **rank_settings(self._ranks),
        }

    def plan(self) -> dict[str, TensorSpec]:
        """Shape and dtype of the tensors of all factors."""
        plan: dict[str, TensorSpec] = {}
        for weight, key in peft_keys(self._weights).items():
            rank = fused_width(weight) * self._ranks[weight][0]
            a, b = weight_shapes(weight, self._linears, rank=rank, num_experts=self._num_experts)
            plan[f"{key}.lora_A.weight"] = (a, self._dtype)
            plan[f"{key}.lora_B.weight"] = (b, self._dtype)
        return plan

    def tensors(self, modules: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the file; a fused pair is made when it is asked for."""
        for weight, key in peft_keys(self._weights).items():
            fused = fused_weight(weight)
            pair = self._fused(weight, fused) if fused else self._factors[_linear(weight)]
            yield f"{key}.lora_A.weight", pair.a.detach()
            yield f"{key}.lora_B.weight", pair.b.detach()
        yield from modules.items()

    def _rank(self, weight: str) -> tuple[int, float]:
        fused = fused_weight(weight)
        if fused is None:
            spec = self._specs[_linear(weight)]
            return spec.rank, spec.scale
        specs = [self._specs[path] for path in self._paths(fused) if path in self._specs]
        scale = Counter(spec.scale for spec in specs).most_common(1)[0][0]
        return max(spec.rank for spec in specs), scale

    def _paths(self, fused: FusedWeight) -> Iterator[str]:
        for expert in range(self._num_experts):
            for projection in fused.projections:
                yield fused.path(expert, projection)

    def _fused(self, weight: str, fused: FusedWeight) -> LoraFactors:
        rank, scale = self._ranks[weight]
        return fuse_experts(
            fused,
            self._factors,
            num_experts=self._num_experts,
            shape=self._linears[fused.path(0, fused.projections[0])],
            rank=rank,
            scale=scale,
            dtype=self._dtype,
        )


def _linear(weight: str) -> str:
    return weight.removesuffix(".weight")
