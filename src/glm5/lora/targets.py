"""Which modules a list of Hugging Face target names means, and which pair each linear gets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch import nn

from glm5.errors import AdapterError
from glm5.lora.patterns import broken_patterns, first_match, matches
from glm5.lora.spec import LoraSpec, PairSpec
from glm5.model.linear import AbsorbedProjection
from glm5.model.names import GlobalNames, expert_name, is_stacked
from glm5.ops.grouped import MAX_RANK

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
# Names inside a decoder layer on both sides.
_HF_PARTS = ((".self_attention", ".self_attn"), (".local_experts.", "."))


@dataclass(frozen=True)
class TargetModule:
    """A module to adapt, the Hugging Face linears that it holds, and the pairs that they get."""

    path: str
    module: nn.Module
    hf_linears: tuple[str, ...]
    pairs: dict[str, PairSpec]


@dataclass
class _Used:
    """What of a spec has met a linear."""

    targets: set[str] = field(default_factory=set)
    rank_pattern: set[str] = field(default_factory=set)
    alpha_pattern: set[str] = field(default_factory=set)
    exclude: set[str] = field(default_factory=set)


def find_targets(chunks: Sequence[GPTModel], spec: LoraSpec) -> list[list[TargetModule]]:
    """Every decoder linear that `spec` adapts, for each of this rank's stages; collective.

    MTP layers are left alone (no engine loads adapters of those).

    Raises:
        AdapterError: a name is unknown, given twice, or matches nothing in this model; a pattern
        is none, matches nothing, or tells apart experts that are computed together; dropout where
        it cannot be exact.
    """
    _check_spec(spec)
    used = _Used()
    found = [list(_matches(chunk, spec, used)) for chunk in chunks]
    _check_all_used(spec, used)
    return found


def hf_path(path: str, hf_linear: str) -> str:
    """`decoder.layers.3.self_attention.linear_proj`, "o_proj" -> its Hugging Face path.

    `path` has global numbers.
    """
    parent = path.rpartition(".")[0].replace("decoder.layers.", "model.layers.", 1)
    for mcore, hf in _HF_PARTS:
        parent = parent.replace(mcore, hf)
    return f"{parent}.{hf_linear}"


def _matches(model: GPTModel, spec: LoraSpec, used: _Used) -> Iterator[TargetModule]:
    global_name = GlobalNames(model)
    for path, module in model.named_modules():
        hf_linears = HF_LINEARS.get(path.rpartition(".")[2], ())
        wanted = [name for name in hf_linears if name in spec.targets]
        if not wanted or not path.startswith("decoder."):
            continue
        stacked = is_stacked(path)
        if stacked and spec.expert_lora == "none":
            continue
        _check_dropout(module, spec)
        # a pattern must mean the same for all experts, also for those of other ranks
        experts = range(model.config.num_moe_experts) if stacked else range(1)
        pairs = {}
        for name in wanted:
            # where nothing is stacked an expert's name is the module's
            paths = [hf_path(expert_name(global_name(path), e), name) for e in experts]
            if (pair := _pair(paths, spec, used)) is not None:
                _check_rank(paths[0], pair, stacked=stacked)
                pairs[name] = pair
        used.targets.update(pairs)
        if pairs:
            yield TargetModule(path, module, hf_linears, pairs)


def _pair(paths: Sequence[str], spec: LoraSpec, used: _Used) -> PairSpec | None:
    """Of the linear at `paths`, one for each expert; None if it is excluded."""
    excluded = [path for path in paths if matches(path, spec.exclude)]
    used.exclude.update(_endings(spec, excluded))
    if excluded:
        _check_alike(paths, excluded, "lora.exclude leaves out some experts of a layer")
        return None
    for patterns, met in (
        (spec.rank_pattern, used.rank_pattern),
        (spec.alpha_pattern, used.alpha_pattern),
    ):
        met.update(p for path in paths if (p := first_match(patterns, path)) is not None)
    pairs = [spec.pair(path) for path in paths]
    alike = [path for path, pair in zip(paths, pairs, strict=True) if pair == pairs[0]]
    _check_alike(paths, alike, "lora's patterns give experts of a layer different pairs")
    return pairs[0]


def _check_rank(path: str, pair: PairSpec, *, stacked: bool) -> None:
    if stacked and pair.rank > MAX_RANK:
        raise AdapterError(
            "the rank of an adapter of routed experts is too large",
            got=f"{pair.rank} for {path}",
            expected=f"at most {MAX_RANK}, which the grouped kernels compute",
            remedy=r"set lora.rank_pattern = { 'mlp\.experts\..*' = "
            f"{MAX_RANK} }}, or lora.expert_lora = 'none'",
        )


def _endings(spec: LoraSpec, excluded: Iterable[str]) -> set[str]:
    """Which of spec.exclude excluded these paths."""
    if isinstance(spec.exclude, str):
        return {spec.exclude} if any(excluded) else set()
    return {ending for ending in spec.exclude for path in excluded if matches(path, (ending,))}


def _check_alike(paths: Sequence[str], alike: Sequence[str], what: str) -> None:
    if len(alike) != len(paths):
        other = next(path for path in paths if path not in alike)
        raise AdapterError(
            what,
            got=f"{alike[0]} unlike {other}",
            expected="the same for all experts of a layer, whose factors are stacked",
            remedy=r"write \d+ for the number of the expert",
        )


def _check_dropout(module: nn.Module, spec: LoraSpec) -> None:
    if spec.dropout and isinstance(module, AbsorbedProjection):
        raise AdapterError(
            "LoRA dropout cannot be computed for kv_b_proj",
            got=f"lora.dropout {spec.dropout} with kv_b_proj among the targets",
            expected="a mask on each key's latent, which absorbed attention sees once for the base "
            "and the adapter together",
            remedy="set lora.dropout to 0, or leave kv_b_proj out of lora.targets",
        )


def _check_spec(spec: LoraSpec) -> None:
    _check_names(spec.targets)
    whole = spec.exclude if isinstance(spec.exclude, str) else None
    if problems := broken_patterns([*spec.rank_pattern, *spec.alpha_pattern], whole):
        raise AdapterError("lora's patterns are no regular expressions", got="; ".join(problems))
    ranks = [spec.adapter_rank, *spec.rank_pattern.values()]
    if min(ranks) < 1 or not 0 <= spec.dropout < 1:
        raise AdapterError(
            "an adapter's numbers are out of range",
            got=f"ranks {ranks}, dropout {spec.dropout}",
            expected="ranks from 1, dropout from 0 to below 1",
        )


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


def _check_all_used(spec: LoraSpec, used: _Used) -> None:
    """A pipeline stage may lack what another one has."""
    everywhere = [used] * dist.get_world_size()
    dist.all_gather_object(everywhere, used)
    excludes = (spec.exclude,) if isinstance(spec.exclude, str) else spec.exclude
    for setting, given in (
        ("targets", spec.targets),
        ("exclude", tuple(name for name in excludes if name)),
        ("rank_pattern", tuple(spec.rank_pattern)),
        ("alpha_pattern", tuple(spec.alpha_pattern)),
    ):
        hit = set().union(*(getattr(one, setting) for one in everywhere))
        if missed := [name for name in given if name not in hit]:
            raise AdapterError(
                f"lora.{setting}: something matches no linear that could be adapted",
                got=missed,
                expected="names that occur in the model and, but for targets, among the targets; "
                "not all excluded, and not behind an earlier pattern that matches, too",
                remedy=f"remove them from lora.{setting}, or see lora.exclude",
            )
