"""A Megatron-Core transformer layer that hands the selected keys to the layer below it."""

from __future__ import annotations

from typing import Any

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor


class Glm5TransformerLayer(TransformerLayer):
    """TransformerLayer whose `context` is IndexShare's top-k.

    Megatron passes every layer's second result to the next layer as `context`, and saves it with
    the hidden states where it recomputes activations; a decoder without cross-attention leaves it
    free.
    """

    def _forward_attention(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        context: Tensor | None = None,
        *,
        packed_seq_params: PackedSeqParams | None = None,
        **unused: Any,
    ) -> tuple[Tensor, Tensor]:
        """context: topk_indices [t, index_topk] int32 of the nearest full layer above, or None."""
        assert attention_mask is None, "masking lives in the documents; attention_mask must be None"
        normed = self.input_layernorm(hidden_states)
        output, topk_indices = self.self_attention(normed, context, packed_seq_params)
        return hidden_states + output, topk_indices
