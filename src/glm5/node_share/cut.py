"""Smaller models of a published shape: fewer layers, narrower ones."""

from __future__ import annotations

from typing import Any

from glm5.config import Glm5Config
from glm5.errors import ConfigError

_WIDTHS = (
    "vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "q_lora_rank",
    "num_attention_heads", "num_key_value_heads", "index_n_heads", "index_topk",
)  # fmt: skip


def cut_model(glm5: Glm5Config, *, layers: int | None = None, narrow: int = 1) -> Glm5Config:
    """The first `layers` of a model (all without a number), without its MTP layers.

    Raises:
        ConfigError: the model has fewer layers, or a width is no multiple of `narrow`.
    """
    raw = glm5.to_hf_dict()
    count = raw["num_hidden_layers"] if layers is None else layers
    if not 1 <= count <= raw["num_hidden_layers"]:
        raise ConfigError(
            "the model does not have so many layers",
            got=count,
            expected=f"1 to {raw['num_hidden_layers']}",
        )
    raw = with_layers(raw, glm5.mlp_layer_types[:count], glm5.indexer_types[:count])
    return Glm5Config.from_hf_dict(narrowed(raw, narrow))


def with_layers(raw: dict[str, Any], mlps: Any, indexers: Any) -> dict[str, Any]:
    """A config.json with decoder layers of these kinds instead."""
    spelled_otherwise = ("index_topk_freq", "index_skip_topk_offset", "index_topk_pattern")
    kept = {name: value for name, value in raw.items() if name not in spelled_otherwise}
    return kept | {
        "num_hidden_layers": len(mlps),
        "num_nextn_predict_layers": 0,
        "first_k_dense_replace": list(mlps).count("dense"),
        "mlp_layer_types": list(mlps),
        "indexer_types": list(indexers),
    }


def narrowed(raw: dict[str, Any], narrow: int) -> dict[str, Any]:
    """A config.json with every width divided but those of one head, and so the experts' number.

    Raises:
        ConfigError: a width is no multiple of `narrow`.
    """
    if narrow == 1:
        return raw
    wrong = {name: raw[name] for name in _WIDTHS if raw[name] % narrow}
    if wrong:
        raise ConfigError(
            "the model cannot be narrowed so",
            got=f"{narrow}; {', '.join(f'{name} {value}' for name, value in wrong.items())}",
            expected="a divisor of every width, such as 8",
        )
    return raw | {
        **{name: raw[name] // narrow for name in _WIDTHS},
        "n_routed_experts": max(raw["n_routed_experts"] // narrow, raw["num_experts_per_tok"]),
        # they must lie in the vocabulary
        "eos_token_id": [1],
        "pad_token_id": 0,
    }
