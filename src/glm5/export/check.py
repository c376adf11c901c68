"""What an export proved before it reported success."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from glm5.checkpoint.hf_model import set_latent_eps
from glm5.config import DEFAULT_LATENT_NORM_EPS, Glm5Config
from glm5.errors import CheckFailedError
from glm5.parity.compare import LIMIT, Bounded, relative_error


@dataclass(frozen=True)
class ExportCheck(Bounded):
    """One comparison of logits; the error is relative to the largest reference logit."""

    what: str
    error: float
    limit: float | None


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


def as_it_is(
    glm5: Glm5Config, reference: Any, token_ids: Tensor, ours: Tensor
) -> list[ExportCheck]:
    """How far `transformers` is when nobody sets the latent norms' eps in it, where that matters.

    It hard-wires 1e-6, which serving engines do not: told, since a user may load it so. Leaves
    `reference` as it is without help.
    """
    if glm5.latent_norm_eps == DEFAULT_LATENT_NORM_EPS:
        return []
    set_latent_eps(reference, DEFAULT_LATENT_NORM_EPS)
    with torch.no_grad():
        theirs = reference(token_ids[None].to(reference.device), use_cache=False).logits[0]
    what = f"transformers by itself, latent eps {DEFAULT_LATENT_NORM_EPS:g} instead of "
    what += f"{glm5.latent_norm_eps:g}"
    return [ExportCheck(what, relative_error(ours, theirs.float().cpu()), None)]


def share_lost(kept: Tensor, wanted: Tensor, base: Tensor) -> float:
    """|wanted - kept| / |wanted - base|: the part of an adapter's effect that was rounded away."""
    effect = torch.linalg.vector_norm(wanted - base)
    return float(torch.linalg.vector_norm(wanted - kept) / effect.clamp_min(1e-30))
