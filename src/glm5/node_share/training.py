"""A model with random weights, and the real trainer's loop over random tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from torch import nn

from glm5.checkpoint.load import build_for
from glm5.config import Glm5Config
from glm5.lora.attach import attach_lora
from glm5.lora.spec import LoraSpec
from glm5.node_share.random_weights import draw_weights
from glm5.plan.workload import Workload
from glm5.train.chat import TokenizedChat
from glm5.train.loop import TrainLoop
from glm5.train.optimizer import build_optimizer, build_scheduler, wrap_data_parallel
from glm5.train.packing import PackedDataset
from glm5.train.run_config import TrainSection
from glm5.train.sections import OptimizerSection
from glm5.train.state import TrainState
from glm5.train.steps import Values

OPTIMIZER = OptimizerSection(lr=1e-4)
ADAPTER_ALPHA = 32.0


class StepTaker(TrainLoop):
    """A training loop whose steps are asked for one by one; nothing is logged or saved."""

    def take(self, step: int) -> Values:
        """Step `step`, from 1."""
        return self._step(step)


def random_model(
    config: Glm5Config, work: Workload, device: torch.device, **options: Any
) -> GPTModel:
    """The rank's stage in bf16, its weights drawn on the device; `options` go to build_for."""
    (model,) = build_for(
        config,
        dtype="bfloat16",
        device=device,
        recompute=work.recompute,
        indexer_loss_coeff=work.indexer_loss_coeff,
        base_weights=work.base_weights,
        **options,
    )
    if device.type == "cpu":
        _dispatch_as_on_a_gpu(model)
    draw_weights(model)
    return model.train()


def adapt(model: GPTModel, work: Workload) -> None:
    """Attaches the adapters of the workload, if it has any."""
    if work.mode == "full":
        return
    spec = LoraSpec(
        adapter_rank=work.adapter_rank,
        adapter_alpha=ADAPTER_ALPHA,
        targets=work.targets,
        expert_lora=work.expert_lora,
    )
    attach_lora(model, spec, seed=0)


def trained(model: GPTModel, steps: int) -> TrainState:
    """With gradient buffers, an optimizer and a schedule of so many steps."""
    wrapped = wrap_data_parallel([model])
    optimizer = build_optimizer(wrapped, OPTIMIZER)
    return TrainState(wrapped, optimizer, build_scheduler(optimizer, OPTIMIZER, steps))


def step_taker(state: TrainState, work: Workload, document_tokens: int, steps: int) -> StepTaker:
    """One row of random tokens per data-parallel rank and step, in documents of that length."""
    words = _own_words(state.chunks[0].module.config.glm5.vocab_size)
    rows = parallel_state.get_data_parallel_world_size()
    data = _random_rows(words, rows, work.seq_len, document_tokens)
    train = TrainSection(steps=steps, global_batch_size=rows)
    return StepTaker(state, data, None, train, shuffle=False)


def _own_words(vocab_size: int) -> range:
    """Those whose embeddings this rank has.

    Where its peers only seem to exist all others would be embedded as zeros, and alike tokens go to
    the same experts.
    """
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    first = parallel_state.get_tensor_model_parallel_rank() * (vocab_size // ranks)
    return range(first, first + vocab_size // ranks)


def _random_rows(words: range, rows: int, seq_len: int, document_tokens: int) -> PackedDataset:
    draw = np.random.default_rng(0)
    lengths = [document_tokens] * (seq_len // document_tokens)
    if seq_len % document_tokens:
        lengths.append(seq_len % document_tokens)
    chats = [
        TokenizedChat(
            draw.integers(words.start, words.stop, count).astype(np.int32),
            np.arange(count) > 0,
            "random tokens",
        )
        for count in lengths * rows
    ]
    return PackedDataset(chats, seq_len)


def _dispatch_as_on_a_gpu(model: nn.Module) -> None:
    """On a CPU the layers gather all tokens on all ranks instead, which takes more memory."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.moe.moe_layer import MoELayer

    from glm5.model.dispatcher import alltoall_dispatcher

    for layer in model.modules():
        if isinstance(layer, MoELayer):
            groups = ProcessGroupCollection.use_mpu_process_groups()
            layer.token_dispatcher = alltoall_dispatcher(layer, groups)
