"""What an export proved before it reported success."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from glm5.errors import CheckFailedError
from glm5.parity.compare import LIMIT, Bounded, relative_error


@dataclass(frozen=True)
class ExportCheck(Bounded):
    """One comparison of logits; the error is relative to the largest reference logit."""

    what: str
    error: float
    limit: float


def check_logits(what: str, got: Tensor, reference: Tensor, limit: float = LIMIT) -> ExportCheck:
    """Compares logits [t, vocab].

    Raises:
        CheckFailedError: they differ by more than `limit` of their scale; nothing is published.
    """
    check = ExportCheck(what, relative_error(got, reference), limit)
    if not check.ok:
        raise CheckFailedError(
            f"the export computes other logits: {what}",
            got=f"an error of {check.error:.3g} of the logits' scale",
            expected=f"at most {limit:g}",
            remedy="nothing was written; report this with the checkpoint's glm5.json",
        )
    return check


def share_lost(kept: Tensor, wanted: Tensor, base: Tensor) -> float:
    """|wanted - kept| / |wanted - base|: the part of an adapter's effect that was rounded away."""
    effect = torch.linalg.vector_norm(wanted - base)
    return float(torch.linalg.vector_norm(wanted - kept) / effect.clamp_min(1e-30))
