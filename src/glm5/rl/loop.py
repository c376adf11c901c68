"""GRPO step by step: weights to the engine, completions, rewards, gap, updates."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from megatron.core import parallel_state
from torch import Tensor

from glm5.errors import EngineError, Glm5Error, RewardError
from glm5.lora.switch import without_adapters
from glm5.rl.advantages import group_advantages
from glm5.rl.batch import PolicyBatcher, split_updates
from glm5.rl.choices import Choices, ChoiceShape
from glm5.rl.collect import Collected, Collector, Decode, Group
from glm5.rl.first_rank import FirstRank
from glm5.rl.gap import Gap, GapLimits
from glm5.rl.gap_meter import GapMeter
from glm5.rl.metrics import collected_metrics, policy_metrics
from glm5.rl.passes import Passes, Replayer
from glm5.rl.policy_loss import PolicyLoss, check_finite
from glm5.rl.rollout import Engine
from glm5.rl.row import Document, PolicyRow
from glm5.rl.run_config import RlConfig
from glm5.rl.sync import WeightSync
from glm5.train.gradients import connect, zero_gradients
from glm5.train.state import TrainState
from glm5.train.steps import StepLoop, Values


@dataclass(frozen=True)
class Sampler:
    """What only the first rank has."""

    engine: Engine
    collector: Collector


class RlLoop(StepLoop):
    """Steps of one batch of completions and `rl.updates` updates each."""

    harmless = (EngineError, RewardError)

    def __init__(
        self,
        run: RlConfig,
        state: TrainState,
        sampler: Sampler | None,
        sync: WeightSync,
        first_rank: FirstRank,
        decode: Decode,
    ) -> None:
        """sampler: on the first rank, None elsewhere."""
        self.run_config = run
        self.section = run.train
        self.state = state
        self._sampler = sampler
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
        connect(state)
