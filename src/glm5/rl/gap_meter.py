"""Measures the gap between trainer and engine over the tokens of a step, on all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from numpy.typing import NDArray
from torch import Tensor

from glm5.model.replay import Stream
from glm5.rl.gap import Gap, WorstToken
from glm5.rl.rollout import Rollout
from glm5.runtime.distributed import default_device

TOKENS_BEFORE = 10
QUANTILES = {"min": 0.0, "p01": 0.01, "p50": 0.5, "p99": 0.99, "max": 1.0}

_OVERLAPS: tuple[Stream, ...] = get_args(Stream)


class GapMeter:
    """Collects the response tokens of one step on this rank, then compares over all ranks.

    Keeps the tensors of `add` until `reduce`, and there takes 8 bytes per response token of the
    whole step on every rank of the last pipeline stage: exact quantiles need all values at once.
    """

    def __init__(self) -> None:
        self._parts: list[tuple[Tensor, ...]] = []
        self._overlaps: dict[Stream, list[Tensor]] = {kind: [] for kind in _OVERLAPS}

    def add(
        self,
        log_probs: Tensor,
        rollout_log_probs: Tensor,
        mask: Tensor,
        sequences: Tensor,
        positions: Tensor,
    ) -> None:
        """Notes the tokens of a micro-batch, or this context-parallel rank's part of one.

        All are [t], on one device. log_probs, rollout_log_probs fp32; mask bool, True where the
        label is a response token; sequences integer, which of the step's rollouts, numbered over
        all ranks, the token is of; positions integer: index of the label in prompt and response.
        No wait for a GPU.
        """
        tensors = (log_probs, rollout_log_probs, mask, sequences, positions)
        self._parts.append(tuple(tensor.detach() for tensor in tensors))

    def add_overlap(self, kind: Stream, counts: Tensor) -> None:
        """Notes counts [2]: choices of the engine's, and those that the trainer would make too."""
        self._overlaps[kind].append(counts.double())

    def reduce(self, rollouts: Mapping[int, Rollout], num_sequences: int) -> Gap:
        """The gap over all ranks; every rank must call it, also one that has no tokens.

        rollouts: at least those whose tokens this rank added, by their number.
        """
        overlaps = self._shared_overlaps()
        gap = None
        if parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            group = parallel_state.get_data_parallel_group(with_context_parallel=True)
            gap = _compare(self._own_tokens(), rollouts, num_sequences, overlaps, group)
        told = [gap]
        dist.broadcast_object_list(
            told,
            src=parallel_state.get_pipeline_model_parallel_last_rank(),
            group=parallel_state.get_pipeline_model_parallel_group(),
        )
        assert told[0] is not None
        return told[0]

    def _own_tokens(self) -> _Tokens:
        if not self._parts:
            none = np.zeros(0)
            return _Tokens(none, none, none.astype(np.int64), none.astype(np.int64))
        new, drawn, mask, sequences, positions = map(torch.cat, zip(*self._parts, strict=True))
        return _Tokens(
            *(x[mask].double().cpu().numpy() for x in (new, drawn)),
            *(x[mask].long().cpu().numpy() for x in (sequences, positions)),
        )

    def _shared_overlaps(self) -> dict[Stream, float]:
        device = default_device()
        none = torch.zeros(2, dtype=torch.float64, device=device)
        sums = torch.stack([sum(self._overlaps[kind], none) for kind in _OVERLAPS])
        # every stage has layers of its own; ranks that repeat each other do so for all tokens
        dist.all_reduce(sums)
        totals = zip(_OVERLAPS, sums.tolist(), strict=True)
        return {kind: same / recorded for kind, (recorded, same) in totals if recorded}


# minus |d|, number of the rollout, position, and all about the token: the least one is the worst
_Candidate = tuple[float, int, int, WorstToken]


@dataclass(frozen=True)
class _Tokens:
    """Response tokens of this rank, each [n]."""

    log_probs: NDArray[np.float64]
    rollout_log_probs: NDArray[np.float64]
    sequences: NDArray[np.int64]
    positions: NDArray[np.int64]

    @property
    def differences(self) -> NDArray[np.float64]:
        # the same infinity on both sides differs by NaN, which is counted
        with np.errstate(invalid="ignore"):
            return self.log_probs - self.rollout_log_probs


def _compare(
    tokens: _Tokens,
    rollouts: Mapping[int, Rollout],
    num_sequences: int,
    overlaps: dict[Stream, float],
    group: dist.ProcessGroup,
) -> Gap:
    own = tokens.differences
    # sorted, so that sums do not depend on which rank has which token
    d = np.sort(_gather(own, group))
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        ratio = np.exp(d)
        size = len(d)
        return Gap(
            num_tokens=size,
            num_non_finite=int((~(np.isfinite(d) & np.isfinite(ratio))).sum()),
            abs_diff=_mean(np.abs(d)),
            kl=_mean(ratio - 1 - d),
            ratio_quantiles={
                name: float(np.quantile(ratio, q)) if size else np.nan
                for name, q in QUANTILES.items()
            },
            effective_sample_size=float(ratio.sum() ** 2 / (size * (ratio**2).sum())),
            over_1_nat=_mean(np.abs(d) > 1),
            sequence_abs_diff=_sequence_means(own, tokens.sequences, num_sequences, group),
            overlaps=overlaps,
            worst=_worst(tokens, rollouts, group),
        )


def _mean(values: NDArray[np.float64] | NDArray[np.bool_]) -> float:
    return float(values.mean()) if len(values) else float("nan")


def _gather(own: NDArray[np.float64], group: dist.ProcessGroup) -> NDArray[np.float64]:
    """The values of all ranks of the group, however many each has."""
    device, ranks = default_device(), dist.get_world_size(group)
    counts = torch.empty(ranks, dtype=torch.int64, device=device)
    dist.all_gather_into_tensor(counts, torch.tensor([len(own)], device=device), group=group)
    longest = int(counts.max())
    padded = torch.zeros(longest, dtype=torch.float64, device=device)
    padded[: len(own)] = torch.from_numpy(own)
    everywhere = torch.empty(ranks * longest, dtype=torch.float64, device=device)
    dist.all_gather_into_tensor(everywhere, padded, group=group)
    parts = everywhere.view(ranks, longest).cpu().numpy()
    sizes = counts.tolist()
    return np.concatenate([part[:size] for part, size in zip(parts, sizes, strict=True)])


def _sequence_means(
    d: NDArray[np.float64],
    sequences: NDArray[np.int64],
    num_sequences: int,
    group: dist.ProcessGroup,
) -> NDArray[np.float64]:
    sums = np.bincount(sequences, weights=np.abs(d), minlength=num_sequences)
    counts = np.bincount(sequences, minlength=num_sequences)
    assert len(sums) == num_sequences, "a token is of a rollout that the step does not have"
    shared = torch.from_numpy(np.stack([sums, counts])).to(default_device())
    dist.all_reduce(shared, group=group)
    total, count = shared.cpu().numpy()
    return np.asarray(total / count)


def _worst(
    tokens: _Tokens, rollouts: Mapping[int, Rollout], group: dist.ProcessGroup
) -> WorstToken | None:
    """The worst of all ranks; of several equal ones the first of the first rollout."""
    size = np.abs(tokens.differences)
    size[np.isnan(size)] = np.inf
    found = None
    if len(size):
        at = int(np.lexsort((tokens.positions, tokens.sequences, -size))[0])
        place = (int(tokens.sequences[at]), int(tokens.positions[at]))
        found = (-float(size[at]), *place, _describe(tokens, at, rollouts[place[0]]))
    everywhere: list[_Candidate | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everywhere, found, group=group)
    candidates = [candidate for candidate in everywhere if candidate is not None]
    return min(candidates, key=lambda candidate: candidate[:3])[3] if candidates else None


def _describe(tokens: _Tokens, at: int, rollout: Rollout) -> WorstToken:
    position = int(tokens.positions[at])
    ids = np.concatenate([rollout.prompt_ids, rollout.response_ids])
    drawn = float(tokens.rollout_log_probs[at])
    recorded = rollout.log_probs[position - len(rollout.prompt_ids)]
    assert np.array_equal(drawn, recorded, equal_nan=True), "tokens and rollouts are out of step"
    return WorstToken(
        request=rollout.request,
        position=position,
        token_id=int(ids[position]),
        log_prob=float(tokens.log_probs[at]),
        rollout_log_prob=drawn,
        before=tuple(ids[max(0, position - TOKENS_BEFORE) : position].tolist()),
    )
