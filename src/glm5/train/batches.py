"""Which rows this rank computes, in the shape that its layout needs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from megatron.core import parallel_state

from glm5.errors import DataError
from glm5.runtime.distributed import current_layout
from glm5.train.packing import PackedDataset, PackedRow, concat_rows, pad_row


@dataclass(frozen=True)
class BatchShaper:
    """Turns row numbers into this rank's micro-batches.

    Ranks that exchange tokens need equally long micro-batches: where the model is split they are
    padded to the capacity of their rows.
    """

    data: PackedDataset
    rows_per_micro_batch: int
    pad_token_id: int

    def share(self, rows: Sequence[int]) -> list[Sequence[int]]:
        """Micro-batch i of the batch goes to data-parallel rank i mod dp_size.

        Every rank gets equally many, the last ones empty where the rows do not suffice: ranks must
        meet in every collective.
        """
        size = self.rows_per_micro_batch
        ranks = parallel_state.get_data_parallel_world_size()
        rank = parallel_state.get_data_parallel_rank()
        micro_batches = [rows[start : start + size] for start in range(0, len(rows), size)]
        missing = -len(micro_batches) % (ranks * micro_batches_together())
        return [*micro_batches, *[()] * missing][rank::ranks]

    def micro_batches(self, shares: Sequence[Sequence[int]]) -> Iterator[PackedRow]:
        """The rows of each share, end to end; an empty share is a row without any loss."""
        for rows in shares:
            yield self._shape(concat_rows([self.data[row] for row in rows]) if rows else self._idle)

    @property
    def _idle(self) -> PackedRow:
        row = self.data[0]
        return PackedRow(row.input_ids, row.labels, torch.zeros_like(row.loss_mask), row.cu_seqlens)

    @property
    def capacity(self) -> int:
        """Tokens of a padded micro-batch, over all context-parallel ranks."""
        multiple = token_multiple()
        return math.ceil(self.rows_per_micro_batch * self.data.seq_length / multiple) * multiple

    def _shape(self, row: PackedRow) -> PackedRow:
        layout = current_layout()
        if not layout.splits_model and layout.cp == 1:
            return row
        return pad_row(row, self.capacity, self.pad_token_id)


def micro_batches_together() -> int:
    """The number of a rank's micro-batches must be a multiple of this.

    Interleaved stages work on groups of pp micro-batches in turn (arXiv 2104.04473, section 2.2).
    """
    layout = current_layout()
    return layout.pp if layout.vpp > 1 else 1


def token_multiple() -> int:
    """Tokens of a micro-batch must be a multiple of this: ranks hold equal contiguous parts."""
    return (
        parallel_state.get_tensor_model_parallel_world_size()
        * parallel_state.get_context_parallel_world_size()
    )


def context_share(x: torch.Tensor) -> torch.Tensor:
    """x [t] -> [t / cp], this context-parallel rank's contiguous part.

    Raises:
        DataError: the ranks do not divide the row.
    """
    size = parallel_state.get_context_parallel_world_size()
    if x.numel() % size:
        raise DataError(
            "a row does not divide over the context-parallel ranks",
            got=f"{x.numel()} tokens over {size} ranks",
            expected="a multiple of the number of ranks",
            remedy="pad the row, as training does",
        )
    return x.chunk(size)[parallel_state.get_context_parallel_rank()]
