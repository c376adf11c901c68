"""`glm5 verify`: the whole comparison of one checkpoint with `transformers`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from glm5.checkpoint.convert import block_scaled_tensors
from glm5.checkpoint.hf_layout import hf_tensors
from glm5.config import DEFAULT_LATENT_NORM_EPS, Glm5Config
from glm5.parity.compare import Finding, compare
from glm5.parity.float8 import float8_findings
from glm5.parity.pair import observe_pair
from glm5.parity.tokens import draw_tokens


@dataclass(frozen=True)
class Case:
    """Documents that are compared together."""

    name: str
    lengths: tuple[int, ...]
    batched: bool = False


@dataclass(frozen=True)
class Report:
    """All findings; `tied_rows` counts queries whose selection differs by a tie."""

    findings: tuple[Finding, ...]
    tied_rows: int
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return all(finding.ok for finding in self.findings)

    def as_dict(self) -> dict[str, object]:
        findings = [finding.as_dict() for finding in self.findings]
        notes = list(self.notes)
        return {"ok": self.ok, "tied_rows": self.tied_rows, "notes": notes, "findings": findings}


def cases(topk: int) -> tuple[Case, ...]:
    """Lengths below and above topk, packed and batched: below topk every indexer bug hides."""
    short, long = max(2, topk // 2), 3 * topk + 5
    return (
        Case("short", (short,)),
        Case("long", (long,)),
        Case("packed", (long, short, 1, topk, topk + 1)),
        Case("batched", (long, long), batched=True),
    )


def verify(model: GPTModel, reference: Any, *, seed: int = 0) -> Report:
    """Compares two models of one checkpoint, both fp32 and on one device.

    A model on frozen float8 weights has no gradients of those; what products in float8 would change
    is measured, too.

    Logits, hidden states, indexer scores and gradients of the next-token loss must agree to 1e-4 of
    their scale, selections wherever scores are further apart than rounding. `transformers` runs on
    our selection, so that a tie broken differently leaves the rest comparable.
    """
    glm5: Glm5Config = model.config.glm5
    generator = torch.Generator().manual_seed(seed)
    device = next(model.parameters()).device
    findings = [_finite_weights(model)]
    tied_rows = 0
    for case in cases(glm5.index_topk):
        token_ids = draw_tokens(glm5, sum(case.lengths), generator)
        found, ties = _verify_case(model, reference, case, token_ids.to(device))
        findings += found
        tied_rows += ties
    if model.config.base_weights == "fp8":
        findings += float8_findings(model, draw_tokens(glm5, 3 * glm5.index_topk + 5, generator))
    return Report(tuple(findings), tied_rows, latent_eps_notes(glm5))


def latent_eps_notes(glm5: Glm5Config) -> tuple[str, ...]:
    """What a user of transformers must know who does not set the latent norms' eps as we do."""
    if glm5.latent_norm_eps == DEFAULT_LATENT_NORM_EPS:
        return ()
    return (
        f"latent_norm_eps is {glm5.latent_norm_eps:g} and was set in transformers; it hard-wires "
        f"{DEFAULT_LATENT_NORM_EPS:g}: by itself it computes another model",
    )


def _finite_weights(model: GPTModel) -> Finding:
    """Some are invisible in what a model computes: a NaN in a router's bias orders both alike."""
    held = [*model.named_parameters(), *model.named_buffers()]
    plain = [(name, x) for name, x in held if x.is_floating_point() and x.itemsize > 1]
    bad = [name for name, x in plain if not x.isfinite().all()]
    float8 = block_scaled_tensors(model).items()
    bad += [name for name, x in float8 if torch.stack(x.count_faults()).any()]
    return Finding("-", "weights that are not finite", bad[0] if bad else "-", len(bad), 0)


def _verify_case(
    model: GPTModel, reference: Any, case: Case, token_ids: Tensor
) -> tuple[list[Finding], int]:
    pair = observe_pair(model, reference, token_ids, case.lengths, batched=case.batched)
    worst = max(pair.selections, key=lambda selection: selection.wrong_rows, default=None)
    where = f"layer {worst.layer}" if worst and worst.wrong_rows else "-"
    finding = Finding(case.name, "wrongly selected rows", where, pair.wrong_rows, 0)
    theirs = replace(pair.theirs, gradients=_of_what_trains(model, pair.theirs.gradients))
    findings = compare(case.name, pair.ours, theirs, case.lengths)
    return [*findings, finding], pair.tied_rows


def _of_what_trains(model: GPTModel, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without those of frozen float8 weights; what passes through them reaches all others."""
    if model.config.base_weights == "dtype":
        return gradients
    layout = hf_tensors(model.config.glm5)
    return {name: gradient for name, gradient in gradients.items() if not layout[name].quantisable}
