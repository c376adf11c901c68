"""What of a model trains, and so is in its checkpoint: everything, or adapters on a frozen base
and the whole parameters that were unfrozen beside them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch import Tensor, nn

from glm5.checkpoint.ckpt_dir import LoraRecord
from glm5.checkpoint.convert import mcore_tensors
from glm5.checkpoint.glm5_rules import glm5_rules
from glm5.errors import AdapterError
from glm5.lora.attach import attach_lora
from glm5.lora.patterns import first_match

# Kinds of parameters that can train whole beside an adapter, by their Hugging Face names.
KINDS: Mapping[str, str] = {
    "router": r"model\.layers\.\d+\.mlp\.gate\.weight",
    "norms": r"model\.(norm|layers\.\d+\.(input_layernorm|post_attention_layernorm"
    r"|self_attn\.(q_a_layernorm|kv_a_layernorm)))\.weight",
    "embeddings": r"model\.embed_tokens\.weight",
    "lm_head": r"lm_head\.weight",
}


def adapt(chunks: Sequence[GPTModel], lora: LoraRecord, *, seed: int) -> None:
    """Freezes a rank's stages, attaches the adapters and unfreezes `lora.train`; collective.

    Raises:
        AdapterError: a setting means nothing in this model, or nothing that can train.
    """
    attach_lora(chunks, lora.spec(), seed=seed)
    unfreeze(chunks, lora.train)


def unfreeze(chunks: Sequence[GPTModel], patterns: Sequence[str]) -> None:
    """Lets whole parameters train: those of a kind, or whose Hugging Face name a pattern matches.

    A pattern is a regular expression for the name or an ending of it that starts after a dot.
    Those of the MTP layer stay frozen. Collective.

    Raises:
        AdapterError: a pattern matches nothing, or something that cannot train whole.
    """
    if not patterns:
        return
    found = [hit for chunk in chunks for hit in _hits(chunk, patterns)]
    _check_hits(patterns, [(pattern, hf_name) for pattern, hf_name, _ in found])
    for _, _, parameter in found:
        parameter.requires_grad_()


def trained_modules(model: GPTModel) -> dict[str, Tensor]:
    """Hugging Face name -> this rank's part of every tensor of the modules that train whole beside
    adapters: with a router's weight goes its bias, which does not train.

    Empty where everything trains.
    """
    if not _is_frozen(model):
        return {}
    trained = [hf for hf, p in _whole_parameters(model) if p.requires_grad]
    modules = {hf_name.rpartition(".")[0] for hf_name in trained}
    return {hf: t for hf, t in _whole_tensors(model) if hf.rpartition(".")[0] in modules}


def sharded_trained(model: GPTModel) -> dict[str, Any]:
    """Megatron's sharded tensors of what the checkpoint of this model holds."""
    sharded = model.sharded_state_dict()
    if not _is_frozen(model):
        return sharded
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    return {name: value for name, value in sharded.items() if name in trained}


def load_trained(model: GPTModel, tensors: dict[str, Any]) -> None:
    """Puts loaded tensors into the model; what is frozen is left as it is."""
    model.load_state_dict(tensors, strict=not _is_frozen(model))


def _is_frozen(model: nn.Module) -> bool:
    """Whether anything is; a stage of a run with adapters need not have one."""
    return not all(parameter.requires_grad for parameter in model.parameters())


def _hits(model: GPTModel, patterns: Sequence[str]) -> Iterator[tuple[str, str, nn.Parameter]]:
    for hf_name, parameter in _whole_parameters(model):
        kinds = [kind for kind in patterns if kind in KINDS and _is_kind(kind, hf_name)]
        written = first_match([p for p in patterns if p not in KINDS], hf_name)
        for pattern in [*kinds, *([] if written is None else [written])]:
            yield pattern, hf_name, parameter


def _whole_parameters(model: GPTModel) -> Iterator[tuple[str, nn.Parameter]]:
    for hf_name, tensor in _whole_tensors(model):
        if isinstance(tensor, nn.Parameter):
            yield hf_name, tensor


def _whole_tensors(model: GPTModel) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, tensor) of what is one tensor on both sides; not of the MTP layer."""
    tensors = mcore_tensors(model)
    for rule in glm5_rules(model.config.glm5, include_mtp=False):
        if len(rule.hf_names) == 1 and rule.mcore_name in tensors:
            yield rule.hf_names[0], tensors[rule.mcore_name]


def _is_kind(kind: str, hf_name: str) -> bool:
    return re.fullmatch(KINDS[kind], hf_name) is not None


def _check_hits(patterns: Sequence[str], hits: Iterable[tuple[str, str]]) -> None:
    everywhere: list[list[tuple[str, str]]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everywhere, list(hits))
    found = {hit for rank in everywhere for hit in rank}
    cannot = sorted(n for _, n in found if not any(_is_kind(kind, n) for kind in KINDS))
    missed = [pattern for pattern in patterns if pattern not in {pattern for pattern, _ in found}]
    if cannot or missed:
        raise AdapterError(
            "lora.train names what cannot train whole beside an adapter",
            got=f"{cannot[:5]}" if cannot else f"{missed}, which match no parameter",
            expected=f"{', '.join(KINDS)}, or patterns that match parameters of these kinds",
            remedy="adapt linears with lora.targets; the indexer learns from its own loss alone",
        )
