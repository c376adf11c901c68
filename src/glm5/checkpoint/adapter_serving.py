"""Write an adapter as the folder that SGLang and vLLM load completely."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from glm5.checkpoint.adapter import (
    FactorSpec,
    LoraAdapter,
    LoraFactors,
    is_expert,
    padded,
    rescaled,
    scales_exactly,
)
from glm5.checkpoint.adapter_engines import PARTNERS, Engine, check_rank, check_servable
from glm5.checkpoint.adapter_file import Progress, write_adapter_file
from glm5.checkpoint.adapter_keys import PREFIX, STACKED_NAMES, expert_path
from glm5.checkpoint.adapter_layout import MLP_TARGETS, adapter_linears
from glm5.checkpoint.adapter_ranks import alpha_for
from glm5.checkpoint.adapter_serving_check import check_serving_adapter
from glm5.checkpoint.adapter_settings import CONFIG_FILE
from glm5.checkpoint.adapter_valid import check_adapter, checked_pair
from glm5.checkpoint.atomic import new_folder
from glm5.checkpoint.names import summarise
from glm5.checkpoint.safetensors_file import TensorSpec
from glm5.config import Glm5Config
from glm5.errors import AdapterError


@dataclass(frozen=True, slots=True)
class ServingReport:
    """How an adapter was brought into the one form that engines read."""

    rank: int
    """r of the folder: the largest rank; smaller ones end in zeros."""
    alpha: float
    num_tensors: int
    num_filled: int
    """Linears that are not adapted, and got zeros because the engine wants them present."""
    num_rounded: int
    """Linears whose b took up another scale, and was rounded once to its dtype for it."""


def write_serving_adapter(
    folder: str | Path,
    adapter: LoraAdapter,
    engine: Engine,
    *,
    config: Glm5Config,
    base_name: str,
    progress: Progress = lambda done, total: None,
) -> ServingReport:
    """Write the adapter under Hugging Face names, in the factors' dtype, one pair at a time.

    2-D pairs per linear and expert; with "shared_outer" one 3-D pair `mlp.experts.{w1,w2,w3}` per
    projection of a layer, the shared side [1, ...], the other [n_routed_experts, ...]. Exactly:

    * an engine loads q_a_proj with kv_a_proj_with_mqa, gate_proj with up_proj, and all experts of
      a layer together; whichever is not adapted gets zeros;
    * it reads one rank: smaller ones end in zeros;
    * it reads one scale, alpha / rank: that of most linears. The b of others takes up the ratio,
      exactly where that is a power of two, else rounded once (`ServingReport.num_rounded`).

    `check_serving_adapter` has passed before the folder appears. Raises AdapterError for what the
    engine cannot serve (whole modules, some linears, see `check_servable`) and for what
    `check_adapter` and `checked_pair` refuse, and CheckpointError for a folder in use.
    """
    linears = adapter_linears(config)
    specs = check_adapter(adapter, linears, config)
    check_servable(specs, engine)
    if adapter.modules:
        raise AdapterError(
            f"{engine} serves no whole modules beside an adapter",
            got=summarise(adapter.modules),
            remedy="serve the merged model (`glm5 export --as merged`)",
        )
    writer = _ServingWriter(adapter, specs, linears, config)
    check_rank(writer.rank, engine)
    with new_folder(folder) as staging:
        (staging / CONFIG_FILE).write_text(writer.settings(base_name), encoding="utf-8")
        plan = writer.plan()
        write_adapter_file(staging, plan, writer.tensors(), progress)
        check_serving_adapter(staging, engine, config)
    return writer.report(len(plan))


class _ServingWriter:
    def __init__(
        self,
        adapter: LoraAdapter,
        specs: Mapping[str, FactorSpec],
        linears: Mapping[str, tuple[int, int]],
        config: Glm5Config,
    ) -> None:
        self._factors = adapter.factors
        self._specs = specs
        self._linears = linears
        self._num_experts = config.n_routed_experts
        self._dtype = next(iter(specs.values())).dtype
        self.rank = max(spec.rank for spec in specs.values())
        self._scale = Counter(spec.scale for spec in specs.values()).most_common(1)[0][0]
        self._alpha = alpha_for(self._scale, self.rank)
        wanted = _with_partners(specs, config)
        self._stacked: list[str] = []
        if adapter.expert_lora == "shared_outer":
            self._stacked = list(dict.fromkeys(_stacked(p) for p in wanted if is_expert(p)))
            wanted = {path for path in wanted if not is_expert(path)}
        # in the model's order
        self._paths = [path for path in linears if path in wanted]

    def settings(self, base_name: str) -> str:
        """adapter_config.json: what the engines read, and what people look for."""
        leaves = {path.rpartition(".")[2] for path in (*self._paths, *self._stacked)}
        settings = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base_name,
            "r": self.rank,
            "lora_alpha": self._alpha,
            "lora_dropout": 0.0,
            "bias": "none",
            "target_modules": sorted(leaves),
        }
        return json.dumps(settings, indent=2) + "\n"

    def plan(self) -> dict[str, TensorSpec]:
        """Shape and dtype of every tensor."""
        plan: dict[str, TensorSpec] = {}
        for path in self._paths:
            a, b = self._shapes(path)
            plan |= {_name(path, "A"): (a, self._dtype), _name(path, "B"): (b, self._dtype)}
        for stacked in self._stacked:
            a, b = self._shapes(expert_path(stacked, 0))
            shared = _shared_side(stacked)
            n_a, n_b = (1 if shared == side else self._num_experts for side in "AB")
            plan[_name(_alias(stacked), "A")] = ((n_a, *a), self._dtype)
            plan[_name(_alias(stacked), "B")] = ((n_b, *b), self._dtype)
        return plan

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the file, made when it is asked for."""
        for path in self._paths:
            pair = self._pair(path)
            yield _name(path, "A"), pair.a.detach()
            yield _name(path, "B"), pair.b.detach()
        for stacked in self._stacked:
            a, b = self._stack(stacked)
            yield _name(_alias(stacked), "A"), a
            yield _name(_alias(stacked), "B"), b

    def report(self, num_tensors: int) -> ServingReport:
        """For those who asked for the folder."""
        specs = self._specs.values()
        rounded = sum(not self._is_exact(spec.scale) for spec in specs)
        emitted = len(self._paths) + self._num_experts * len(self._stacked)
        return ServingReport(self.rank, self._alpha, num_tensors, emitted - len(specs), rounded)

    def _is_exact(self, scale: float) -> bool:
        return scale == self._scale or scales_exactly(scale, self._scale)

    def _shapes(self, path: str) -> tuple[tuple[int, int], tuple[int, int]]:
        out_features, in_features = self._linears[path]
        return (self.rank, in_features), (out_features, self.rank)

    def _pair(self, path: str) -> LoraFactors:
        """The pair as it is written; zeros where the linear is not adapted."""
        spec = self._specs.get(path)
        if spec is None:
            a, b = (torch.zeros(shape, dtype=self._dtype) for shape in self._shapes(path))
            return LoraFactors(a, b, self._scale)
        pair = checked_pair(path, self._factors[path], spec, self._linears[path])
        return padded(rescaled(pair, self._scale), self.rank)

    def _stack(self, stacked: str) -> tuple[Tensor, Tensor]:
        """(a, b) of one projection of all experts of a layer."""
        paths = [expert_path(stacked, expert) for expert in range(self._num_experts)]
        adapted = [path for path in paths if path in self._specs]
        self._check_alike(stacked, adapted)
        factors = {path: self._pair(path) for path in paths}
        a = torch.stack([factors[path].a.detach() for path in paths])
        b = torch.stack([factors[path].b.detach() for path in paths])
        shared = a if _shared_side(stacked) == "A" else b
        # one that is not adapted has zeros on the other side, too
        first = shared[paths.index(adapted[0]) if adapted else 0]
        own = [i for i, path in enumerate(paths) if path in self._specs]
        if not all(torch.equal(shared[i], first) for i in own):
            raise AdapterError(
                f"the experts of {stacked} do not share lora_{_shared_side(stacked)}",
                expected='one for all of them, as expert_lora = "shared_outer" says',
                remedy='write it with expert_lora = "per_expert"',
            )
        return (first[None], b) if _shared_side(stacked) == "A" else (a, first[None])

    def _check_alike(self, stacked: str, adapted: list[str]) -> None:
        alike = {self._specs[path] for path in adapted}
        if len(alike) > 1:
            raise AdapterError(
                f"the experts of {stacked} have several ranks or scales",
                got=sorted({(spec.rank, spec.scale) for spec in alike}),
                expected='one, since expert_lora = "shared_outer" shares a factor among them',
                remedy='write it with expert_lora = "per_expert"',
            )


def _with_partners(specs: Mapping[str, FactorSpec], config: Glm5Config) -> set[str]:
    """Every linear that the engine wants present along with those that are adapted."""
    wanted: set[str] = set()
    owners = {path.rsplit(".", 2)[0] for path in specs if is_expert(path)}
    for owner in owners:
        for expert in range(config.n_routed_experts):
            wanted |= {f"{owner}.{expert}.{leaf}" for leaf in MLP_TARGETS}
    for path in specs:
        if not is_expert(path):
            parent, _, leaf = path.rpartition(".")
            wanted |= {path, f"{parent}.{PARTNERS.get(leaf, leaf)}"}
    return wanted


def _stacked(path: str) -> str:
    owner, _, leaf = path.rsplit(".", 2)
    return f"{owner}.{leaf}"


def _alias(stacked: str) -> str:
    """`w1`, `w2`, `w3`: the names that both engines know for experts in one tensor."""
    owner, _, leaf = stacked.rpartition(".")
    return f"{owner}.{STACKED_NAMES[leaf]}"


def _shared_side(stacked: str) -> str:
    return "B" if stacked.endswith("down_proj") else "A"


def _name(module: str, side: str) -> str:
    return f"{PREFIX}{module}.lora_{side}.weight"
