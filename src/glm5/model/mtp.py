"""Multi-token prediction: each position also predicts the token after next of its document."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.utils import apply_prefix_mapping
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from torch import Tensor, nn

from glm5.model.norm import RMSNorm
from glm5.model.parallel import gather_context, own_context
from glm5.model.tokens import whole_row
from glm5.model.transformer_config import Glm5TransformerConfig


class Glm5MtpLayer(MegatronModule):
    """One depth of multi-token prediction, whose next tokens may stand on the next
    context-parallel rank.

    hidden = W [norm(embedding of token i + 1), norm(hidden of token i)], then one decoder layer
    (arXiv 2412.19437, section 2.2).
    """

    def __init__(
        self,
        config: Glm5TransformerConfig,
        layer_number: int,
        decoder_layer: ModuleSpec,
        vp_stage: int | None = None,
        **unused: Any,
    ) -> None:
        super().__init__(config=config)
        self.layer_number = layer_number
        hidden, eps = config.hidden_size, config.layernorm_epsilon
        self.enorm = RMSNorm(config, hidden, eps)
        self.hnorm = RMSNorm(config, hidden, eps)
        self.eh_proj = ColumnParallelLinear(
            2 * hidden, hidden, config=config, init_method=config.init_method, bias=False
        )
        self.mtp_model_layer = build_module(
            decoder_layer, config=config, layer_number=layer_number, vp_stage=vp_stage
        )
        self.final_layernorm = RMSNorm(config, hidden, eps)

    @property
    def transformer_layer(self) -> nn.Module:
        """The name that Megatron-Core 0.16 has for it: its schedules tell it the micro-batch."""
        layer: nn.Module = self.mtp_model_layer
        return layer

    def forward(
        self,
        input_ids: Tensor,
        hidden_states: Tensor,
        embedding: Any,
        packed_seq_params: PackedSeqParams | None,
    ) -> tuple[Tensor, Tensor]:
        """input_ids [b, s / cp] of this rank, states [s / cp (/ tp), b, hidden_size] -> (states of
        the next depth, the tokens that it saw: those one later)."""
        whole = gather_context(input_ids)
        input_ids = own_context(next_in_document(whole, packed_seq_params))
        # the attention layer counts positions from the documents' borders
        ahead = embedding(input_ids=input_ids, position_ids=None)
        predict = partial(self._predict, packed_seq_params)
        if self.config.recompute_granularity == "full" and self.training:
            return tensor_parallel.checkpoint(predict, False, hidden_states, ahead), input_ids
        return predict(hidden_states, ahead), input_ids

    def _predict(
        self, packed: PackedSeqParams | None, hidden_states: Tensor, ahead: Tensor
    ) -> Tensor:
        both = torch.cat([self.enorm(ahead), self.hnorm(hidden_states)], dim=-1)
        states = gather_from_tensor_model_parallel_region(self.eh_proj(both)[0])
        if self.config.sequence_parallel:
            # a copy: the layer's norm keeps it, and of a view it would keep all ranks' tokens
            states = scatter_to_sequence_parallel_region(states).clone()
        states, _ = self.mtp_model_layer(hidden_states=states, packed_seq_params=packed)
        return self.final_layernorm(states)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Megatron's sharded tensors, under the keys of Megatron's own MTP layer."""
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        apply_prefix_mapping(state, {f"{prefix}mtp_model_layer.": f"{prefix}transformer_layer."})
        return state


class Glm5Model(GPTModel):
    """GPTModel whose MTP loss is that of whole rows, whatever part of them this rank has."""

    def _postprocess(self, **inputs: Any) -> Tensor:
        """Losses [b, s / cp] fp32 where there are labels, else logits [b, s / cp, vocab / tp].

        Without labels the MTP layers run, and have no loss.
        """
        if not self.mtp_process:
            return super()._postprocess(**inputs)
        labels, packed = inputs["labels"], inputs["packed_seq_params"]
        hidden_states, states, tokens = (
            inputs["hidden_states"],
            inputs["hidden_states"],
            inputs["input_ids"],
        )
        ahead = []
        for layer in self.mtp.layers:
            states, tokens = layer(tokens, states, self.embedding, packed)
            ahead.append(states)
        if labels is not None and self.training:
            hidden_states = self._with_mtp_loss(
                hidden_states, ahead, labels, inputs["loss_mask"], packed
            )
        logits, _ = self.output_layer(hidden_states)
        if labels is None:
            return logits.transpose(0, 1).contiguous()
        return self.compute_language_model_loss(labels, logits)

    def _with_mtp_loss(
        self,
        hidden_states: Tensor,
        ahead: Sequence[Tensor],
        labels: Tensor,
        loss_mask: Tensor,
        packed: PackedSeqParams | None,
    ) -> Tensor:
        """Returns hidden_states unchanged; its backward also sends the MTP layers' losses down.

        loss = scale / D sum_k n_0 / n_k sum_i mask_k(i) loss_k(i): layer k of D predicts what
        stands k tokens after the label, n_k positions of the row have one, and the trainer divides
        by n_0, as it does the main loss. ahead: D states [s / cp (/ tp), b, hidden_size]; labels,
        loss_mask [b, s / cp].
        """
        labels, loss_mask = gather_context(labels), gather_context(loss_mask)
        num_tokens = loss_mask.sum()
        scale = self.config.mtp_loss_scaling_factor / self.config.mtp_num_layers
        for states in ahead:
            labels, loss_mask = (next_in_document(x, packed) for x in (labels, loss_mask))
            logits, _ = self.output_layer(states)
            losses = self.compute_language_model_loss(own_context(labels), logits)
            share = scale * num_tokens / loss_mask.sum().clamp(min=1)
            losses = share * own_context(loss_mask) * losses
            # Megatron's schedules set this scaler to the scale of the main loss
            hidden_states = MTPLossAutoScaler.apply(hidden_states, losses)
        return hidden_states


def next_in_document(x: Tensor, packed_seq_params: PackedSeqParams | None) -> Tensor:
    """x [b, s] of whole rows -> what stands one token later; 0 after a document's last token."""
    batch, seq_len = x.shape
    starts = whole_row(seq_len, batch, packed_seq_params, x.device).starts.view(x.shape)
    goes_on = torch.zeros_like(x, dtype=torch.bool)
    goes_on[:, :-1] = starts[:, 1:] == starts[:, :-1]
    return torch.where(goes_on, x.roll(-1, dims=1), 0)
