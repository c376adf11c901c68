"""Multi-token prediction: each position also predicts the token after next of its document."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.multi_token_prediction import (
    MTPLossAutoScaler,
    MultiTokenPredictionLayer,
)
from torch import Tensor

from glm5.model.parallel import gather_context, own_context
from glm5.model.tokens import whole_row


class Glm5MtpLayer(MultiTokenPredictionLayer):
    """Megatron's layer, whose next tokens may stand on the next context-parallel rank.

    hidden = W [norm(embedding of token i + 1), norm(hidden of token i)], then one decoder layer
    (arXiv 2412.19437, section 2.2).
    """

    def _get_embeddings(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        embedding: Any,
        hidden_states: Tensor,
        packed_seq_params: PackedSeqParams | None = None,
        padding_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, None, Tensor, Tensor]:
        """input_ids [b, s / cp] of this rank -> (those one token later, ..., their embeddings)."""
        assert padding_mask is None, "padding has documents of its own; padding_mask must be None"
        whole = gather_context(input_ids)
        input_ids = own_context(next_in_document(whole, packed_seq_params))
        # the attention layer counts positions from the documents' borders
        decoder_input = embedding(input_ids=input_ids, position_ids=position_ids)
        return input_ids, position_ids, None, decoder_input, hidden_states


class Glm5Model(GPTModel):
    """GPTModel whose MTP loss is that of whole rows, whatever part of them this rank has."""

    def _postprocess(self, **inputs: Any) -> Tensor:
        """Losses [b, s / cp] fp32 where there are labels, else logits [b, s / cp, vocab / tp].

        Without labels the MTP layers run, and have no loss.
        """
        if not self.mtp_process:
            return super()._postprocess(**inputs)
        labels, packed = inputs["labels"], inputs["packed_seq_params"]
        states = self.mtp(
            input_ids=inputs["input_ids"],
            position_ids=inputs["position_ids"],
            hidden_states=inputs["hidden_states"],
            attention_mask=inputs["attention_mask"],
            packed_seq_params=packed,
            embedding=self.embedding,
        )
        hidden_states, *ahead = states.chunk(1 + self.config.mtp_num_layers)
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
