"""Passes of a step's micro-batches through the model, by Megatron's schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from glm5.model.forward import finish_forward, packed_documents
from glm5.model.replay import Observer, Replay
from glm5.rl.choices import Choices, ChoiceShape
from glm5.rl.gap_meter import GapMeter
from glm5.rl.log_probs import token_log_probs
from glm5.rl.loss_weights import Normalise, loss_weights, weighted_sum
from glm5.rl.overlap import Overlap
from glm5.rl.policy_loss import PolicyLoss, PolicyTokens
from glm5.rl.recorded import Recorded
from glm5.rl.replay import build_replay
from glm5.rl.row import PolicyRow
from glm5.train.batches import context_share
from glm5.train.state import TrainState

LOSS, COUNT = "loss", "count"
"""Of all micro-batches: the weighted sum of the losses, and what it is divided by."""


@dataclass(frozen=True)
class Replayer:
    """Says what a micro-batch replays; choices by the numbers of the completions."""

    recorded: Recorded
    shape: ChoiceShape
    choices: Mapping[int, Choices | None]

    def replay(self, row: PolicyRow, device: torch.device) -> Replay | None:
        """None where nothing is replayed."""
        if self.recorded == "none":
            return None
        documents = [self.choices[number] for number in row.documents]
        lengths = row.packed.cu_seqlens.diff()[: len(documents)].tolist()
        return build_replay(
            documents, lengths, self.recorded, self.shape, device, row.packed.num_tokens
        )


@dataclass(frozen=True)
class Batch:
    """This rank's micro-batches of a step, by update."""

    updates: Sequence[Sequence[PolicyRow]]
    replayer: Replayer

    @property
    def rows(self) -> list[PolicyRow]:
        """Of all updates, in order."""
        return [row for rows in self.updates for row in rows]

    def first_of(self, update: int) -> int:
        """The place of an update's first row among all of them."""
        return sum(len(rows) for rows in self.updates[:update])


@dataclass(frozen=True)
class Scores:
    """Log-probabilities before the step's first update: of each of a batch's rows in order [t / cp]
    fp32, 0 where the label is no response token. Stages before the last one have none.

    old: under the weights that train. reference: under those without adapters, if asked for.
    """

    old: Sequence[Tensor]
    reference: Sequence[Tensor] | None


class Passes:
    """The forward and backward passes of a run's policy."""

    def __init__(
        self, state: TrainState, capacity: int, *, temperature: float, normalise: Normalise
    ) -> None:
        """capacity: tokens of a micro-batch where the model is split."""
        self._state = state
        self._capacity = capacity
        self._temperature = temperature
        self._normalise: Normalise = normalise
        self._forward_backward = get_forward_backward_func()
        self.device = next(state.chunks[0].parameters()).device

    @torch.no_grad()
    def score(self, batch: Batch, meter: GapMeter | None = None) -> list[Tensor]:
        """Log-probabilities of the rows' response tokens under the weights of the moment: see
        `Scores`. `meter` is told how far they are from the engine's, and what a replay overrode."""

        def step(micro_batches: Iterator[tuple[int, PolicyRow]], model: nn.Module) -> Any:
            number, row = next(micro_batches)
            replay = batch.replayer.replay(row, self.device)
            overlap = None if replay is None or meter is None else Overlap(replay, self.device)
            output = self._forward(model, row, replay, overlap)
            if overlap is not None and meter is not None:
                for stream, counts in overlap.counts.items():
                    meter.add_overlap(stream, counts)
            return output, partial(self._scored, number, row)

        for chunk in self._state.chunks:
            chunk.eval()
        reports = self._run(batch.rows, step, forward_only=True)
        for chunk in self._state.chunks:
            chunk.train()
        ordered = sorted(reports, key=lambda report: report["number"])
        scores = [report["log_probs"] for report in ordered]
        if meter is not None:
            for row, log_probs in zip(batch.rows if scores else (), scores, strict=True):
                self._compare(row, log_probs, meter)
        return scores

    def learn(
        self, batch: Batch, update: int, scores: Scores, loss: PolicyLoss
    ) -> dict[str, float]:
        """Gradients of the loss over all micro-batches of an update and all ranks, and its sums:
        those of `PolicyLoss`, LOSS and COUNT."""
        first = batch.first_of(update)

        def step(micro_batches: Iterator[tuple[int, PolicyRow]], model: nn.Module) -> Any:
            number, row = next(micro_batches)
            output = self._forward(model, row, batch.replayer.replay(row, self.device), None)

            def finish(logits: Tensor) -> Any:
                # called on the last stage alone, which scored the rows
                place = first + number
                reference = None if scores.reference is None else scores.reference[place]
                return self._learnt(row, loss, scores.old[place], reference, logits)

            return output, finish

        return self._sum(self._run(batch.updates[update], step, forward_only=False))

    def _run(
        self, rows: Sequence[PolicyRow], step: Callable[..., Any], *, forward_only: bool
    ) -> list[dict[str, Any]]:
        """What the last pipeline stage reports of every micro-batch; nothing on other stages."""
        chunks = self._state.chunks
        reports: list[dict[str, Any]] = self._forward_backward(
            forward_step_func=step,
            # every stage sees all micro-batches, also where a rank has several
            data_iterator=[iter(enumerate(rows)) for _ in chunks],
            model=chunks,
            num_microbatches=len(rows),
            # the shapes that pipeline stages exchange
            seq_length=self._capacity,
            micro_batch_size=1,
            forward_only=forward_only,
        )
        return reports

    def _forward(
        self, model: nn.Module, row: PolicyRow, replay: Replay | None, observer: Observer | None
    ) -> Tensor:
        """Logits [1, t / cp, vocab / tp] on the last stage, else what the next one needs."""
        input_ids = context_share(row.packed.input_ids).to(self.device, non_blocking=True)
        # the documents of the whole row: keys come from all context-parallel ranks
        documents = packed_documents(
            row.packed.cu_seqlens, self.device, replay=replay, observer=observer
        )
        output: Tensor = model(
            input_ids=input_ids[None],
            position_ids=torch.arange(input_ids.numel(), device=self.device)[None],
            attention_mask=None,
            packed_seq_params=documents,
        )
        finish_forward(model, documents)
        return output

    def _token_log_probs(self, row: PolicyRow, logits: Tensor) -> tuple[Tensor, Tensor]:
        targets = torch.where(row.packed.loss_mask > 0, row.packed.labels, -1)
        return token_log_probs(
            logits[0],
            self._own(targets),
            temperature=self._temperature,
            group=parallel_state.get_tensor_model_parallel_group(),
        )

    def _scored(self, number: int, row: PolicyRow, logits: Tensor) -> Any:
        log_probs, _ = self._token_log_probs(row, logits)
        none = torch.zeros((), device=self.device)
        report = {"number": number, "log_probs": log_probs}
        return none, none.to(torch.int32), report

    def _learnt(
        self,
        row: PolicyRow,
        loss: PolicyLoss,
        old: Tensor,
        reference: Tensor | None,
        logits: Tensor,
    ) -> Any:
        """Megatron's loss function: (sum with gradient, what divides it, report)."""
        log_probs, entropy = self._token_log_probs(row, logits)
        mask = row.packed.loss_mask > 0
        tokens = PolicyTokens(
            log_probs=log_probs,
            old_log_probs=old,
            rollout_log_probs=self._own(row.rollout_log_probs),
            ref_log_probs=reference,
            advantages=self._own(row.advantages),
            mask=self._own(mask),
            entropy=entropy,
        )
        losses, sums = loss(tokens)
        # of the whole row, before it is shared out
        weights, counts = loss_weights(mask, row.packed.cu_seqlens, self._normalise)
        total, count = weighted_sum(losses, self._own(weights), self._own(counts))
        return total, count, {**sums, LOSS: total.detach().double(), COUNT: count.double()}

    def _compare(self, row: PolicyRow, log_probs: Tensor, meter: GapMeter) -> None:
        rollout, mask, sequences, positions = map(
            self._own,
            (row.rollout_log_probs, row.packed.loss_mask > 0, row.sequences, row.positions),
        )
        meter.add(log_probs, rollout, mask, sequences, positions)

    def _own(self, x: Tensor) -> Tensor:
        """x [t] on the host -> [t / cp], this context-parallel rank's part on the device."""
        return context_share(x).to(self.device, non_blocking=True)

    def _sum(self, reports: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
        """Adds up micro-batches and ranks; only the last pipeline stage has reports."""
        told = [sorted(reports[0]) if reports else None]
        pipeline = parallel_state.get_pipeline_model_parallel_group()
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        dist.broadcast_object_list(told, src=last, group=pipeline)
        names = told[0]
        assert names is not None, "every rank has a micro-batch"
        sums = torch.zeros(len(names), dtype=torch.float64, device=self.device)
        for report in reports:
            sums += torch.stack([report[name] for name in names])
        ranks = parallel_state.get_data_parallel_group(with_context_parallel=True)
        dist.all_reduce(sums, group=ranks)
        dist.all_reduce(sums, group=pipeline)
        return dict(zip(names, sums.tolist(), strict=True))
