"""The checkpoints of Megatron-Core's own DSA modules: their names, as rules to Hugging Face's."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal, get_args

from glm5.checkpoint.glm5_rules import glm5_rules
from glm5.checkpoint.names import summarise
from glm5.checkpoint.rules import GatedPair, HalfSwap, Rename, Rule
from glm5.config import Glm5Config
from glm5.errors import CheckpointError
from glm5.runtime.megatron_core import RopeSlice, probe_core

NormPlace = Literal["fused", "own"]

_FUSED_LATENT = ".self_attention.linear_q_up_proj.layer_norm_weight"
_OWN_LATENT = ".self_attention.q_layernorm.weight"
_FUSED_MLP = ".mlp.linear_fc1.layer_norm_weight"
_EXPERT = re.compile(r"\.mlp\.experts\.local_experts\.(\d+)\.")
# The tensors of an indexer whose rows are dimensions of a head.
_BY_HEAD = (".linear_wq_b.weight", ".linear_wk.weight", ".k_norm.weight", ".k_norm.bias")


@dataclass(frozen=True, kw_only=True)
class CoreLayout:
    """What differs between the checkpoints of the releases."""

    indexer_rope: RopeSlice
    """Which dimensions of an indexer head that release rotates; Hugging Face's model: the first."""
    latent_norms: NormPlace
    """Whether the norms of the latents belong to the up-projections or are modules of their own."""
    mlp_norm: NormPlace
    """The same of the norm before the MLP of a dense layer."""


def layout_of_names(names: Collection[str], indexer_rope: RopeSlice | None = None) -> CoreLayout:
    """The layout that the tensors of a checkpoint have by their names.

    `indexer_rope` defaults to that of the releases which place the norms of the latents so: the
    last dimensions where they are fused (up to 0.18), else the first.
    Raises CheckpointError where the names are of no layout that is known, or of two.
    """
    fused = any(name.endswith(_FUSED_LATENT) for name in names)
    if fused == any(name.endswith(_OWN_LATENT) for name in names):
        raise CheckpointError(
            "these tensors have no layout of Megatron-Core's own DSA modules that is known",
            got=summarise(names),
            expected=f"in every layer either ...{_FUSED_LATENT} (Megatron-Core up to 0.18) "
            f"or ...{_OWN_LATENT}",
            remedy="save it with the core's DSA spec, one key per layer (torch_dist)",
        )
    return CoreLayout(
        indexer_rope=_checked(indexer_rope or ("last" if fused else "first")),
        latent_norms="fused" if fused else "own",
        mlp_norm="fused" if any(name.endswith(_FUSED_MLP) for name in names) else "own",
    )


def layout_of_core(
    indexer_rope: RopeSlice | None = None, latent_norms: NormPlace | None = None
) -> CoreLayout:
    """The layout that the installed Megatron-Core trains, with Transformer Engine's linears.

    Raises MegatronCoreError where it is not known, and CheckpointError for an unknown choice.
    """
    core = probe_core()
    norms = latent_norms or core.latent_norms
    if norms not in get_args(NormPlace):
        raise CheckpointError(
            "unknown place of the norms of the latents",
            got=repr(norms),
            expected=", ".join(get_args(NormPlace)),
        )
    return CoreLayout(
        indexer_rope=_checked(indexer_rope or core.indexer_rope),
        latent_norms=norms,
        mlp_norm="fused",
    )


def core_rules(config: Glm5Config, layout: CoreLayout, *, include_mtp: bool) -> list[Rule]:
    """Every rule of this model in that layout; an expert's target is `stacked_name` and its number.

    Raises CheckpointError where the rope does not fit in an indexer head.
    """
    rules = glm5_rules(config, include_mtp=include_mtp)
    return [_in_layout(rule, config, layout) for rule in rules]


def stacked_name(name: str) -> tuple[str, int | None]:
    """`...mlp.experts.local_experts.7.x` -> (`...mlp.experts.experts.x`, 7); (name, None) else."""
    found = _EXPERT.search(name)
    if found is None:
        return name, None
    return _EXPERT.sub(".mlp.experts.experts.", name), int(found[1])


def _in_layout(rule: Rule, config: Glm5Config, layout: CoreLayout) -> Rule:
    name = _core_name(rule.mcore_name, config, layout)
    assert isinstance(rule, Rename | GatedPair), f"no layout is known of {rule}"
    if layout.indexer_rope == "last" and ".indexer." in name and name.endswith(_BY_HEAD):
        assert isinstance(rule, Rename)
        return HalfSwap(rule.hf, name, config.index_head_dim, config.qk_rope_head_dim)
    return replace(rule, mcore=name)


def _core_name(name: str, config: Glm5Config, layout: CoreLayout) -> str:
    name = name.replace(".self_attention.indexer.", ".self_attention.core_attention.indexer.")
    name = name.replace(".mtp_model_layer.", ".transformer_layer.")
    if layout.latent_norms == "fused":
        for latent in ("q", "kv"):
            own = f".self_attention.{latent}_layernorm.weight"
            name = name.replace(own, f".self_attention.linear_{latent}_up_proj.layer_norm_weight")
    if layout.mlp_norm == "fused" and _is_dense(name, config):
        name = name.replace(".pre_mlp_layernorm.weight", _FUSED_MLP)
    return name


def _is_dense(name: str, config: Glm5Config) -> bool:
    found = re.match(r"decoder\.layers\.(\d+)\.", name)
    return found is not None and config.mlp_layer_types[int(found[1])] == "dense"


def _checked(indexer_rope: str) -> RopeSlice:
    for known in get_args(RopeSlice):
        if indexer_rope == known:
            return known
    raise CheckpointError(
        "unknown dimensions of an indexer head",
        got=repr(indexer_rope),
        expected=", ".join(get_args(RopeSlice)),
    )
