"""What each process of a layout does to train on drawn choices instead of its own."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from torch import Tensor, nn

from glm5.model.forward import finish_forward, packed_documents
from glm5.model.replay import Replay
from glm5.rl.choices import ChoiceShape
from glm5.rl.overlap import Overlap
from glm5.rl.replay import build_replay
from glm5.train import loop as train_loop
from glm5.train.batches import context_share
from glm5.train.packing import PackedRow
from glm5.train.sft import reduce_loss
from tests.parallel.jobs import Job, numbers, record_gradients, start
from tests.recorded import drawn_record


def replayed_steps(jobs: list[Job]) -> list[dict[str, Any]]:
    """The first step of each job on choices that follow from the documents' tokens alone."""
    return [_replayed_step(job) for job in jobs]


def _replayed_step(job: Job) -> dict[str, Any]:
    loop, overlaps = start(job), list[Overlap]()
    gradients = record_gradients(loop)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_loop, "forward_step", partial(_forward_step, overlaps))
        steps = [numbers(loop._step(1))]
    found = {stream: sum(o.counts[stream] for o in overlaps) for stream in ("experts", "topk")}
    return {
        "tp_rank": parallel_state.get_tensor_model_parallel_rank(),
        "etp_rank": parallel_state.get_expert_tensor_parallel_rank(),
        "gradients": gradients[0],
        "steps": steps,
        "overlap": found,
    }


def _forward_step(
    overlaps: list[Overlap], data_iterator: Iterator[PackedRow], model: nn.Module
) -> tuple[Tensor, Callable[[Tensor], Any]]:
    """As the trainer's own, with a replay."""
    row = next(data_iterator)
    input_ids, labels, loss_mask = map(context_share, (row.input_ids, row.labels, row.loss_mask))
    replay = drawn_replay(row, ChoiceShape.from_config(model.config.glm5))
    overlaps.append(Overlap(replay, input_ids.device))
    documents = packed_documents(
        row.cu_seqlens, input_ids.device, replay=replay, observer=overlaps[-1]
    )
    losses = model(
        input_ids=input_ids[None],
        position_ids=torch.arange(input_ids.numel())[None],
        attention_mask=None,
        labels=labels[None],
        packed_seq_params=documents,
        loss_mask=loss_mask[None],
    )
    finish_forward(model, documents)
    return losses, partial(reduce_loss, loss_mask)


def drawn_replay(row: PackedRow, shape: ChoiceShape) -> Replay:
    """Other choices for each document, the same on every rank."""
    lengths = row.cu_seqlens.diff().tolist()
    parts = row.input_ids.split(lengths)
    documents = [
        drawn_record(len(part), shape, seed=int(part.sum())).pack(shape) if len(part) > 1 else None
        for part in parts
    ]
    return build_replay(documents, lengths, "both", shape, row.input_ids.device, row.num_tokens)
