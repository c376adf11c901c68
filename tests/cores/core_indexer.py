"""Megatron-Core's own DSA indexer, of whatever release is installed, without Transformer Engine."""

from dataclasses import fields
from typing import Any

import pytest
import torch
from megatron.core.transformer.experimental_attention_variant import dsa
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor, nn

from glm5.config import Glm5Config
from glm5.runtime.distributed import ensure_distributed


class Linear(nn.Linear):
    """nn.Linear in Megatron's calling convention."""

    def __init__(self, inputs: int, outputs: int, **options: Any) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return super().forward(x), None


class Norm(nn.LayerNorm):
    """nn.LayerNorm in Megatron's calling convention."""

    def __init__(self, config: Any, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps=eps)


def core_config(glm5: Glm5Config, **more: Any) -> MLATransformerConfig:
    """Megatron's own config of one such layer, with what the installed release knows."""
    known = {field.name for field in fields(MLATransformerConfig)}
    newer = {"dsa_indexer_rope_interleaved": True, "dsa_indexer_rotate_activation": False}
    return MLATransformerConfig(
        num_layers=1,
        hidden_size=glm5.hidden_size,
        num_attention_heads=glm5.num_attention_heads,
        q_lora_rank=glm5.q_lora_rank,
        kv_lora_rank=glm5.kv_lora_rank,
        qk_head_dim=glm5.qk_nope_head_dim,
        qk_pos_emb_head_dim=glm5.qk_rope_head_dim,
        v_head_dim=glm5.v_head_dim,
        rope_type="rope",
        rotary_base=glm5.rope_theta,
        normalization="RMSNorm",
        layernorm_epsilon=glm5.indexer_norm_eps,
        add_bias_linear=False,
        apply_rope_fusion=False,
        use_cpu_initialization=True,
        dsa_indexer_n_heads=glm5.index_n_heads,
        dsa_indexer_head_dim=glm5.index_head_dim,
        dsa_indexer_topk=glm5.index_topk,
        **{name: value for name, value in newer.items() if name in known},
        **more,
    )


def build_indexer(glm5: Glm5Config, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """The indexer in fp32; without the Hadamard rotation, which changes no product q . k."""
    ensure_distributed(torch.device("cpu"))
    monkeypatch.setattr(dsa, "rotate_activation", lambda x: x)
    parts = dsa.DSAIndexerSubmodules(
        linear_wq_b=Linear, linear_wk=Linear, k_norm=Norm, linear_weights_proj=Linear
    )
    return dsa.DSAIndexer(core_config(glm5), parts)
