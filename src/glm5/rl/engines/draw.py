"""Draws tokens by inverting their distribution: one uniform number decides one token."""

from __future__ import annotations

import torch
from torch import Tensor


def draw_tokens(
    logits: Tensor, uniforms: Tensor, *, temperature: float, top_p: float
) -> tuple[Tensor, Tensor]:
    """(tokens [b] int64, their log-probabilities [b] fp32) of one step.

    logits [b, vocab]; uniforms [b] float64 in [0, 1), on the device of the logits. The
    log-probability is that under softmax(logits / temperature) of all tokens in fp32, also where
    top_p kept the draw from some of them. The same uniform and logits give the same token, whatever
    the other rows are. A row with a NaN gives some token with log-probability NaN.
    """
    log_probs = torch.log_softmax(logits.float() / temperature, dim=-1)
    weights = log_probs.double().exp()
    if top_p < 1:
        weights = _keep_top_p(weights, top_p)
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1:]
    # rounding must not carry the largest uniform past the last token that has a weight
    point = torch.minimum(uniforms[:, None] * total, total.nextafter(total.new_zeros(())))
    tokens = torch.searchsorted(cumulative, point, right=True)
    tokens = tokens.clamp(max=logits.shape[-1] - 1)
    return tokens[:, 0], log_probs.gather(-1, tokens)[:, 0]


def _keep_top_p(weights: Tensor, top_p: float) -> Tensor:
    """Zeros but for the fewest most probable tokens that together reach top_p."""
    ordered, order = weights.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered
    kept = torch.where(before < top_p, ordered, 0.0)
    return torch.zeros_like(weights).scatter_(-1, order, kept)
