"""A Megatron-Core transformer layer that hands the selected keys to the layer below it."""

from __future__ import annotations

from typing import Any

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from glm5.model.replay import LayerChoices
from glm5.model.tokens import PackedDocuments


class Glm5TransformerLayer(TransformerLayer):
    """TransformerLayer whose `context` is IndexShare's top-k.

    Megatron passes every layer's second result to the next layer as `context`, and saves it with
    the hidden states where it recomputes activations; a decoder without cross-attention leaves it
    free.
    """

    def __init__(self, *args: Any, of_mtp: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.of_mtp = of_mtp

    def forward(
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
        choices = self._choices(packed_seq_params)
        normed = self.input_layernorm(hidden_states)
        output, topk_indices = self.self_attention(normed, context, packed_seq_params, choices)
        return self._add_mlp(hidden_states + output, choices), topk_indices

    def _add_mlp(self, hidden_states: Tensor, choices: LayerChoices | None) -> Tensor:
        if not self.is_moe_layer:
            return self._forward_mlp(hidden_states)
        normed = self._forward_pre_mlp_layernorm(hidden_states)
        return self._forward_post_mlp(self.mlp(normed, choices), hidden_states)

    def _choices(self, packed: PackedSeqParams | None) -> LayerChoices | None:
        # an MTP layer chooses for itself: engines record the decoder's layers alone
        if self.of_mtp or not isinstance(packed, PackedDocuments):
            return None
        return packed.choices_of(self.layer_number - 1)
