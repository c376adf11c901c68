"""What `fp8_compute` changes in the logits of a model on frozen float8 weights."""

from __future__ import annotations

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from glm5.model.forward import logits
from glm5.model.frozen import products_in_float8
from glm5.model.replay import Replay
from glm5.model.selections import DocumentSelection, LayerSelections, PackedSelection
from glm5.parity.compare import Finding

# An activation in e4m3 is rounded by at most 1/16 of itself and by 1/40 on average, and so is a sum
# of products; blocks add up their errors like noise, a few tenths of the logits' spread at most. A
# wrong scale, a transposed block or a lost piece moves logits by all of their spread.
MEAN_LIMIT = 0.5
# Logits whose error is normal with this share s of a spread v have a KL of (s v)^2 / 2 [nats].
KL_LIMIT = 1.0


@torch.no_grad()
def float8_findings(model: GPTModel, token_ids: Tensor) -> list[Finding]:
    """Errors of products in float8 against exact ones, on one document [t].

    With the exact model's experts and selected keys, which has limits against mistakes, not against
    rounding; and with those that the model chooses itself, where a near tie that falls the other
    way counts as well: told without a limit. Logits differ by shares of their standard deviation
    over the vocabulary, KL is that of the next token in nats, exact against float8.
    """
    seen = _Seen()
    exact = logits(model, token_ids, observer=seen).float()
    with products_in_float8(model):
        same = logits(model, token_ids, replay=seen.replay(model.config.glm5.index_topk)).float()
        own = logits(model, token_ids).float()
    return [
        *_errors("fp8_compute, same choices", exact, same, (MEAN_LIMIT, KL_LIMIT)),
        *_errors("fp8_compute", exact, own, (None, None)),
    ]


class _Seen:
    """What the layers of a forward over one document chose."""

    def __init__(self) -> None:
        self._experts: dict[int, Tensor] = {}
        self._topk: dict[int, Tensor] = {}

    def see_experts(self, layer: int, tokens: range, experts: Tensor) -> None:
        del tokens
        self._experts[layer] = experts

    def see_topk(self, layer: int, queries: range, topk_indices: Tensor) -> None:
        del queries
        self._topk[layer] = topk_indices

    def replay(self, topk: int) -> Replay:
        """The same choices for another forward."""
        selections = {
            layer: LayerSelections(
                topk, (DocumentSelection(0, PackedSelection(indices[topk:].cpu(), topk)),)
            )
            for layer, indices in self._topk.items()
        }
        return Replay(self._experts, selections)


def _errors(
    case: str, exact: Tensor, got: Tensor, limits: tuple[float | None, float | None]
) -> list[Finding]:
    difference = (got - exact).abs() / exact.std(-1, keepdim=True)
    log_p, log_q = exact.log_softmax(-1), got.log_softmax(-1)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1).mean()
    mean_limit, kl_limit = limits
    return [
        Finding(case, "largest logit difference", "-", float(difference.max()), None),
        Finding(case, "mean logit difference", "-", float(difference.mean()), mean_limit),
        Finding(case, "KL of the next token", "-", float(kl), kl_limit),
    ]
