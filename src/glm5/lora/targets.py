"""Which modules a list of Hugging Face target names means."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import nn

from glm5.errors import AdapterError

# Megatron module -> the Hugging Face linears whose weights it holds, in the order of its rows.
HF_LINEARS: dict[str, tuple[str, ...]] = {
    "linear_q_down_proj": ("q_a_proj",),
    "linear_q_up_proj": ("q_b_proj",),
    "linear_kv_down_proj": ("kv_a_proj_with_mqa",),
    "linear_kv_up_proj": ("kv_b_proj",),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
    "linear_wq_b": ("wq_b",),
    "linear_wk": ("wk",),
    "linear_weights_proj": ("weights_proj",),
}
INDEXER_TARGETS = ("wq_b", "wk", "weights_proj")
DEFAULT_TARGETS = tuple(
    name for names in HF_LINEARS.values() for name in names if name not in INDEXER_TARGETS
)


@dataclass(frozen=True)
class TargetModule:
    """A module to adapt, the Hugging Face linears that it holds, and those that are wanted."""

    path: str
    module: nn.Module
    hf_linears: tuple[str, ...]
    wanted: tuple[str, ...]


def find_targets(model: nn.Module, targets: Sequence[str]) -> list[TargetModule]:
    """Every decoder linear named by `targets`; MTP layers are left alone (no engine loads those).

    Raises:
        AdapterError: a name is unknown, given twice, or matches nothing in this model.
    """
    _check_names(targets)
    found = list(_matches(model, frozenset(targets)))
    hit = _on_any_rank({name for target in found for name in target.wanted})
    if missed := [name for name in targets if name not in hit]:
        raise AdapterError(
            "LoRA targets match no module of this model",
            got=missed,
            expected="names that occur in the model",
            remedy="remove them from lora.targets",
        )
    return found


def _on_any_rank(names: set[str]) -> set[str]:
    """A pipeline stage may lack what another one has."""
    everywhere: list[set[str]] = [set()] * dist.get_world_size()
    dist.all_gather_object(everywhere, names)
    return set().union(*everywhere)


def _check_names(targets: Sequence[str]) -> None:
    known = [name for names in HF_LINEARS.values() for name in names]
    unknown = [name for name in targets if name not in known]
    if unknown or not targets or len(set(targets)) != len(targets):
        raise AdapterError(
            "lora.targets is not a list of distinct linear names",
            got=list(targets),
            expected=f"some of {known}",
            remedy="use the names of the Hugging Face linears",
        )


def _matches(model: nn.Module, targets: Iterable[str]) -> Iterator[TargetModule]:
    for path, module in model.named_modules():
        hf_linears = HF_LINEARS.get(path.rpartition(".")[2], ())
        wanted = tuple(name for name in hf_linears if name in targets)
        if wanted and path.startswith("decoder."):
            yield TargetModule(path, module, hf_linears, wanted)
