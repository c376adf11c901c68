"""The GLM-5 family as a list of rules: the only place that knows both sides' names."""

from __future__ import annotations

from collections.abc import Iterable
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from glm5.checkpoint.rules import GatedPair, Rename, Rule

if TYPE_CHECKING:
    from glm5.config import Glm5Config

Section = Literal["model", "layer", "indexer", "dense", "sparse", "expert", "mtp"]

_MODEL = (
    Rename("model.embed_tokens.weight", "embedding.word_embeddings.weight"),
    Rename("model.norm.weight", "decoder.final_layernorm.weight"),
    Rename("lm_head.weight", "output_layer.weight"),
)


def _linear(hf: str, mcore: str) -> Rename:
    return Rename(f"{hf}.weight", f"{mcore}.weight")


def _gated_mlp(hf: str, mcore: str) -> tuple[GatedPair, Rename]:
    fc1 = GatedPair(f"{hf}.gate_proj.weight", f"{hf}.up_proj.weight", f"{mcore}.linear_fc1.weight")
    return fc1, _linear(f"{hf}.down_proj", f"{mcore}.linear_fc2")


def _layer_templates(hf: str, mcore: str) -> dict[Section, tuple[Rule, ...]]:
    """The rules of one transformer layer whose names start with these two prefixes."""
    hf_attn, mcore_attn = f"{hf}.self_attn", f"{mcore}.self_attention"
    hf_indexer, mcore_indexer = f"{hf_attn}.indexer", f"{mcore_attn}.indexer"
    return {
        "layer": (
            _linear(f"{hf}.input_layernorm", f"{mcore}.input_layernorm"),
            _linear(f"{hf}.post_attention_layernorm", f"{mcore}.pre_mlp_layernorm"),
            _linear(f"{hf_attn}.q_a_proj", f"{mcore_attn}.linear_q_down_proj"),
            _linear(f"{hf_attn}.q_a_layernorm", f"{mcore_attn}.q_layernorm"),
            _linear(f"{hf_attn}.q_b_proj", f"{mcore_attn}.linear_q_up_proj"),
            _linear(f"{hf_attn}.kv_a_proj_with_mqa", f"{mcore_attn}.linear_kv_down_proj"),
            _linear(f"{hf_attn}.kv_a_layernorm", f"{mcore_attn}.kv_layernorm"),
            _linear(f"{hf_attn}.kv_b_proj", f"{mcore_attn}.linear_kv_up_proj"),
            _linear(f"{hf_attn}.o_proj", f"{mcore_attn}.linear_proj"),
        ),
        "indexer": (
            _linear(f"{hf_indexer}.wq_b", f"{mcore_indexer}.linear_wq_b"),
            _linear(f"{hf_indexer}.wk", f"{mcore_indexer}.linear_wk"),
            _linear(f"{hf_indexer}.k_norm", f"{mcore_indexer}.k_norm"),
            Rename(f"{hf_indexer}.k_norm.bias", f"{mcore_indexer}.k_norm.bias"),
            _linear(f"{hf_indexer}.weights_proj", f"{mcore_indexer}.linear_weights_proj"),
        ),
        "dense": _gated_mlp(f"{hf}.mlp", f"{mcore}.mlp"),
        "sparse": (
            _linear(f"{hf}.mlp.gate", f"{mcore}.mlp.router"),
            Rename(f"{hf}.mlp.gate.e_score_correction_bias", f"{mcore}.mlp.router.expert_bias"),
            *_gated_mlp(f"{hf}.mlp.shared_experts", f"{mcore}.mlp.shared_experts"),
        ),
        "expert": _gated_mlp(
            f"{hf}.mlp.experts.{{expert}}", f"{mcore}.mlp.experts.local_experts.{{expert}}"
        ),
    }


_HF_LAYER = "model.layers.{layer}"
_MTP_LAYER = "mtp.layers.{mtp}"
_DECODER = _layer_templates(_HF_LAYER, "decoder.layers.{layer}")
_MTP = _layer_templates(_HF_LAYER, f"{_MTP_LAYER}.mtp_model_layer")
_MTP_EXTRAS = (
    _linear(f"{_HF_LAYER}.enorm", f"{_MTP_LAYER}.enorm"),
    _linear(f"{_HF_LAYER}.hnorm", f"{_MTP_LAYER}.hnorm"),
    _linear(f"{_HF_LAYER}.eh_proj", f"{_MTP_LAYER}.eh_proj"),
    _linear(f"{_HF_LAYER}.shared_head.norm", f"{_MTP_LAYER}.final_layernorm"),
)
_TEMPLATES = MappingProxyType({"model": _MODEL, **_DECODER, "mtp": _MTP_EXTRAS})


def templates() -> MappingProxyType[Section, tuple[Rule, ...]]:
    """The rules before expansion, by section, with `{layer}`, `{expert}`, `{mtp}` in their names.

    In section "mtp" `{layer}` is the Hugging Face number, `num_hidden_layers + {mtp}`; the other
    sections hold for an MTP layer too, with `mtp.layers.{mtp}.mtp_model_layer` for
    `decoder.layers.{layer}`.
    """
    return _TEMPLATES


def glm5_rules(config: Glm5Config, *, include_mtp: bool) -> list[Rule]:
    """Every rule of this model, expanded, with global layer and expert numbers."""
    rules: list[Rule] = list(_MODEL)
    for layer in range(config.num_hidden_layers):
        sections = _sections(config.indexer_types[layer], config.mlp_layer_types[layer])
        rules += _expand(_DECODER, sections, config.n_routed_experts, layer=layer)
    return rules + _mtp_rules(config) if include_mtp else rules


def mtp_hf_names(config: Glm5Config) -> list[str]:
    """The Hugging Face tensors that `include_mtp=False` leaves out, to skip or to pass through."""
    return [name for rule in _mtp_rules(config) for name in rule.hf_names]


def hf_modules(rules: Iterable[Rule]) -> dict[str, tuple[str, ...]]:
    """For each Megatron module with a weight, the Hugging Face modules whose weights it holds.

    `...mlp.linear_fc1` gives `(...mlp.gate_proj, ...mlp.up_proj)`, in the order of its rows.
    """
    suffix = ".weight"
    return {
        rule.mcore_name.removesuffix(suffix): tuple(
            name.removesuffix(suffix) for name in rule.hf_names
        )
        for rule in rules
        if rule.mcore_name.endswith(suffix)
    }


def _mtp_rules(config: Glm5Config) -> list[Rule]:
    rules: list[Rule] = []
    for mtp in range(config.num_nextn_predict_layers):
        layer = config.num_hidden_layers + mtp
        sections = _sections("full", "sparse")
        rules += _expand(_MTP, sections, config.n_routed_experts, layer=layer, mtp=mtp)
        rules += [rule.fill(layer=layer, mtp=mtp) for rule in _MTP_EXTRAS]
    return rules


def _sections(indexer_type: str, mlp_type: str) -> list[Section]:
    sections: list[Section] = ["layer"]
    if indexer_type == "full":
        sections.append("indexer")
    return [*sections, "sparse", "expert"] if mlp_type == "sparse" else [*sections, "dense"]


def _expand(
    table: dict[Section, tuple[Rule, ...]],
    sections: list[Section],
    num_experts: int,
    **placeholders: int,
) -> list[Rule]:
    rules: list[Rule] = []
    for section in sections:
        filled = [rule.fill(**placeholders) for rule in table[section]]
        if section == "expert":
            filled = [rule.fill(expert=e) for e in range(num_experts) for rule in filled]
        rules += filled
    return rules
