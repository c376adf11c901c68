"""Starts the adapters of a model, and the whole parameters beside them, from an adapter folder."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from glm5.checkpoint.adapter import LoraAdapter, LoraFactors, rescaled
from glm5.checkpoint.adapter_file import WEIGHTS_FILE, AdapterFile
from glm5.checkpoint.adapter_pairs import local_pairs
from glm5.checkpoint.adapter_read import read_adapter
from glm5.checkpoint.adapter_settings import AdapterSettings
from glm5.checkpoint.convert import fill_targets, mcore_tensors
from glm5.checkpoint.glm5_rules import glm5_rules
from glm5.checkpoint.memory_reader import MemoryReader
from glm5.checkpoint.names import summarise
from glm5.checkpoint.trained import trained_modules
from glm5.errors import AdapterError
from glm5.lora.experts import GroupedLora
from glm5.lora.factors import Adapted, Factors

_EXPERT = re.compile(r"\.experts\.\d+\.")


def check_adapter_folder(folder: Path) -> None:
    """What can be told of it before anything else is loaded.

    Raises:
        AdapterError: it is no adapter folder, or its settings or its file's header are damaged.
    """
    AdapterSettings.read(folder)
    AdapterFile(folder)


@torch.no_grad()
def start_from_adapter(chunks: Sequence[GPTModel], folder: Path) -> None:
    """Gives the attached adapters and the unfrozen parameters of a rank's stages the values of a
    PEFT or serving folder; collective. The optimizer starts anew.

    Every delta is the folder's: ranks must agree, but for trailing zeros, which are cut off; under
    another scale B takes up the ratio, rounded once to the model's dtype. Each rank reads its own
    pairs alone. Experts that share a factor here must have the same in the folder; not the other
    way round.

    Raises:
        AdapterError: the folder is damaged, holds more or less than what trains in this model,
        has other ranks, or experts with factors of their own where this model's share one.
    """
    adapter = read_adapter(folder, chunks[0].config.glm5)
    problems, used = [], set[str]()
    for chunk in chunks:
        for path, module, pair in local_pairs(chunk):
            used.add(path)
            problems += _start_pair(adapter, path, module, pair)
        problems += _start_modules(adapter, chunk, folder)
        used |= trained_modules(chunk).keys()
    left = sorted(_unused_anywhere(adapter, used))
    if left:
        problems.append(f"{summarise(left)} of the folder train nowhere in this model")
    _raise_together(problems, folder)


def _start_pair(adapter: LoraAdapter, path: str, module: Adapted, pair: Factors) -> list[str]:
    """Copies one pair; what is wrong with it, if anything."""
    if path not in adapter.factors:
        return [f"the folder has no pair for {path}"]
    if isinstance(module, GroupedLora) and not _has_one_factor(adapter, path, module):
        return [f"{path} and another expert have factors of their own, which this model shares"]
    rank = pair.a.shape[0]
    found = _cut_zeros(adapter.factors[path], rank)
    if found.a.shape[0] != rank:
        return [f"{path} has rank {found.a.shape[0]} in the folder and {rank} in this model"]
    # the one rounding is that of the copy
    found = rescaled(LoraFactors(found.a, found.b.double(), found.scale), pair.scale)
    if problem := _not_finite(path, found.a, found.b.to(pair.b.dtype)):
        return [problem]
    part, parts = module.ranks.rank(), module.ranks.size()
    a, b = found.a, found.b
    if module.split == "row":
        a = a.chunk(parts, dim=1)[part]
    elif module.split == "column":
        b = b.chunk(parts, dim=0)[part]
    pair.a.copy_(a)
    pair.b.copy_(b)
    return []


def _has_one_factor(adapter: LoraAdapter, path: str, module: GroupedLora) -> bool:
    """Whether the factor that the model's experts share is the first expert's here, too.

    A PEFT folder holds it once for each of them.
    """
    if not module.shares_factors:
        return True
    first = _EXPERT.sub(".experts.0.", path)
    if first not in adapter.factors:
        return False
    own, shared = adapter.factors[path], adapter.factors[first]
    if module.split == "column":
        return torch.equal(own.a, shared.a)
    return torch.equal(own.b, shared.b)


def _cut_zeros(pair: LoraFactors, rank: int) -> LoraFactors:
    """Without the inner dimensions past `rank` if they change nothing."""
    if pair.a[rank:].any() and pair.b[:, rank:].any():
        return pair
    return LoraFactors(pair.a[:rank], pair.b[:, :rank], pair.scale)


def _not_finite(name: str, *tensors: Tensor) -> str | None:
    if all(torch.isfinite(tensor).all() for tensor in tensors):
        return None
    return f"{name} holds NaN or infinity, in the folder or under this lora.alpha"


def _start_modules(adapter: LoraAdapter, model: GPTModel, folder: Path) -> list[str]:
    """Copies whole tensors; a router's bias does not train, so it must be the base's."""
    wanted = trained_modules(model)
    missing = sorted(wanted.keys() - adapter.modules.keys())
    if missing:
        return [f"the folder lacks {summarise(missing)}"]
    other = [
        name
        for name, tensor in wanted.items()
        if not tensor.requires_grad and not torch.equal(adapter.modules[name].to(tensor), tensor)
    ]
    for name in wanted:
        if problem := _not_finite(name, adapter.modules[name]):
            return [problem]
    tensors = mcore_tensors(model)
    rules = [
        rule
        for rule in glm5_rules(model.config.glm5, include_mtp=False)
        if rule.hf_names[0] in wanted and tensors[rule.mcore_name].requires_grad
    ]
    fill_targets(tensors, rules, MemoryReader(adapter.modules, folder / WEIGHTS_FILE))
    return [f"{summarise(other)} differ from the base's"] if other else []


def _unused_anywhere(adapter: LoraAdapter, used: set[str]) -> set[str]:
    """What of the folder no rank takes."""
    names = [*adapter.factors, *adapter.modules]
    device = torch.device("cuda") if dist.get_backend() == "nccl" else torch.device("cpu")
    taken = torch.tensor([name in used for name in names], dtype=torch.uint8, device=device)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return {name for name, hit in zip(names, taken.tolist(), strict=True) if not hit}


def _raise_together(problems: list[str], folder: Path) -> None:
    """An error that one rank finds is every rank's."""
    everywhere: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, problems[0] if problems else None)
    if first := next((problem for problem in everywhere if problem), None):
        raise AdapterError(
            f"training cannot start from {folder}",
            got=first,
            expected="the linears, ranks and expert_lora of [lora], and the parameters of "
            "lora.train",
            remedy="set these as the adapter was trained, or leave lora.init_from out",
        )
