"""GRPO step by step: weights to the engine, completions, rewards, gap, updates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import count

import numpy as np
from megatron.core import parallel_state
from torch import Tensor

from glm5.errors import EngineError, GapError, RewardError
from glm5.lora.switch import without_adapters
from glm5.rl.advantages import group_advantages
from glm5.rl.batch import PolicyBatcher, StepPlan, plan_step
from glm5.rl.choices import Choices, ChoiceShape
from glm5.rl.clock import Clock
from glm5.rl.collect import Collected, Collector, Decode, Group
from glm5.rl.engine import trainer_products
from glm5.rl.first_rank import FirstRank
from glm5.rl.gap import Gap, GapLimits
from glm5.rl.gap_meter import GapMeter
from glm5.rl.metrics import collected_metrics, policy_metrics
from glm5.rl.passes import Batch, Passes, Replayer, Scores
from glm5.rl.policy_loss import PolicyLoss, check_finite
from glm5.rl.products import product_labels
from glm5.rl.row import Document
from glm5.rl.run_config import RlConfig
from glm5.rl.samples import Sample, step_samples, write_samples
from glm5.rl.sections import RlSection
from glm5.rl.sync import WeightSync
from glm5.train.gradients import connect, zero_gradients
from glm5.train.state import TrainState, is_writer
from glm5.train.steps import StepLoop, Values, is_due


class RlLoop(StepLoop):
    """Steps of one batch of completions and `rl.updates` updates each."""

    harmless = (EngineError, RewardError, GapError)

    def __init__(
        self,
        run: RlConfig,
        state: TrainState,
        collector: Collector | None,
        sync: WeightSync,
        first_rank: FirstRank,
        decode: Decode,
    ) -> None:
        """collector: on the first rank, None elsewhere."""
        self._run = run
        self._rl = run.rl
        self.section = run.train
        self.state = state
        self._collector = collector
        self._sync = sync
        self._first_rank = first_rank
        self._decode = decode
        glm5 = state.chunks[0].module.config.glm5
        pad = glm5.eos_token_id[0] if glm5.pad_token_id is None else glm5.pad_token_id
        self._shape = ChoiceShape.from_config(glm5)
        self._batcher = PolicyBatcher(run.rl.max_tokens_per_micro_batch, pad)
        self._passes = Passes(
            state,
            self._batcher.capacity,
            temperature=run.rollout.temperature,
            normalise=run.rl.normalise,
        )
        self._loss = PolicyLoss(
            clip_low=run.rl.clip_low,
            clip_high=run.rl.clip_high,
            dual_clip=run.rl.dual_clip,
            kl_coeff=run.rl.kl_coeff,
            is_low=run.rl.is_low,
            is_high=run.rl.is_high,
        )
        self._limits = GapLimits(run.gap.max_kl, run.gap.max_abs_diff)
        # on the first rank: which completions every rank computes
        self._data_ranks = first_rank.gather(parallel_state.get_data_parallel_rank())
        self.samples: list[Sample] = []
        """Of the last step, on the first rank."""
        connect(state)

    def _step(self, step: int) -> Values:
        clock = Clock()
        with clock.time("sync_seconds"):
            self._hand_over(step - 1)
        choices, collected = self._collect(step)
        values = collected_metrics(collected)
        values["lr"] = self.state.optimizer.param_groups[0]["lr"]
        groups = _documents([group for group in collected.groups if group.teaches], self._rl)
        documents = [document for group in groups for document in group]
        plan = plan_step(self._batcher, groups, self._rl.updates)
        batch = self._batch(plan, choices)
        scored = None
        if batch.updates:
            with clock.time("score_seconds"):
                scored = self._score(batch, documents)
        # before the gap may stop the run: they show why
        self._keep_samples(step, collected, documents, None if scored is None else scored[1])
        if scored is not None:
            scores, gap = scored
            values |= gap.metrics()
            self._limits.check(gap, step, self._decode)
            with clock.time("update_seconds"):
                values |= self._learn(batch, scores, step)
        values["tokens"] = sum(document.num_tokens for document in documents)
        return values | clock.seconds()

    def _labels(self) -> Mapping[str, str]:
        collector = self._collector
        if collector is None:
            return {}
        return product_labels(trainer_products(self._run), collector.engine.products)

    def _keep_samples(
        self, step: int, collected: Collected, documents: Sequence[Document], gap: Gap | None
    ) -> None:
        if not is_writer():
            return
        abs_diffs = [] if gap is None else gap.sequence_abs_diff.tolist()
        self.samples = step_samples(collected.groups, documents, abs_diffs, self._decode)
        if is_due(step, self._rl.samples_every, last=False):
            write_samples(self._run.output.dir, step, self.samples)

    def _hand_over(self, version: int) -> None:
        """The engine samples a step with the weights that the step before left: `version` steps."""
        collector = self._collector
        self._first_rank.keep(lambda: None if collector is None else collector.wake())
        self._sync.hand_over(None if collector is None else collector.engine, version)

    def _collect(self, step: int) -> tuple[list[Choices | None], Collected]:
        """What the step sampled, and, on the first rank, the choices of groups that teach."""
        choices: list[Choices | None] = []

        def collect() -> Collected:
            assert self._collector is not None
            whole = self._collector.collect(step, version=step - 1)
            choices.extend(c for group in whole.groups if group.teaches for c in group.choices)
            return whole.without_choices()

        return choices, self._first_rank.tell(collect)

    def _batch(self, plan: StepPlan, choices: Sequence[Choices | None]) -> Batch:
        """This rank's rows of every update, and what they replay."""

        def share(rank: int) -> dict[int, Choices | None]:
            numbers = plan.numbers(self._data_ranks[rank])
            return {number: choices[number] for number in numbers}

        replays = self._rl.replay != "none" and plan.updates
        own = self._first_rank.deal(share) if replays else {}
        data_rank = parallel_state.get_data_parallel_rank()
        return Batch(
            [
                [self._batcher.row(documents) for documents in micro_batches]
                for micro_batches in plan.of_rank(data_rank)
            ],
            Replayer(self._rl.replay, self._shape, own),
        )

    def _score(self, batch: Batch, documents: Sequence[Document]) -> tuple[Scores, Gap]:
        """Log-probabilities before the first update, and how far they are from the engine's."""
        meter = GapMeter()
        old = self._passes.score(batch, meter)
        by_number = {document.number: document.rollout for document in documents}
        gap = meter.reduce(by_number, len(documents))
        reference: list[Tensor] | None = None
        if self._rl.kl_coeff:
            with without_adapters(self.state.chunks):
                reference = self._passes.score(batch)
        return Scores(old, reference), gap

    def _learn(self, batch: Batch, scores: Scores, step: int) -> Values:
        """One update of the optimizer after the other."""
        sums: Counter[str] = Counter()
        grad_norms = []
        for update in range(len(batch.updates)):
            zero_gradients(self.state)
            found = self._passes.learn(batch, update, scores, self._loss)
            check_finite(found, step)
            _, grad_norm, _ = self.state.optimizer.step()
            self.state.scheduler.step(increment=1)
            sums.update(found)
            grad_norms.append(float(grad_norm))
        return {**policy_metrics(sums), "grad_norm": float(np.mean(grad_norms))}


def _documents(groups: Sequence[Group], section: RlSection) -> list[list[Document]]:
    """The completions of every group with their advantages, numbered in order."""
    advantages = group_advantages(
        [group.rewards for group in groups], divide_by_std=section.divide_by_std
    )
    numbers = count()
    return [
        [
            Document(next(numbers), rollout, float(advantage))
            for rollout, advantage in zip(group.rollouts, values, strict=True)
        ]
        for group, values in zip(groups, advantages, strict=True)
    ]
