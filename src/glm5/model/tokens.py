"""The two input layouts of Megatron-Core, seen as one row of packed documents."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from glm5.model.parallel import of_this_rank
from glm5.model.replay import LayerChoices, Ledger, Observer, Replay, layer_choices
from glm5.model.routes import Routes
from glm5.ops.masks import document_bounds
from glm5.ops.row_major import row_major


@dataclass
class PackedDocuments(PackedSeqParams):
    """Megatron's form of packed documents, with their lengths [tokens] on the host as well.

    Of one forward, if it replays choices or shows them: `ledger` says which were taken.
    """

    lengths: tuple[int, ...] = ()
    replay: Replay | None = None
    observer: Observer | None = None
    ledger: Ledger = field(default_factory=Ledger)

    def choices_of(self, layer: int) -> LayerChoices | None:
        """For decoder layer `layer` (from 0); None where it chooses for itself and nobody looks."""
        return layer_choices(layer, self.replay, self.observer, self.ledger)


@dataclass(frozen=True)
class TokenRow:
    """Documents of a micro-batch, end to end: bshd is b documents of s tokens, thd is cu_seqlens.

    Under context parallelism a rank has a contiguous share of every sequence's queries, and all
    keys. starts, ends [t] int32 of this rank's t queries: query i attends to the keys
    [starts[i], ends[i]); positions [t] int32 count from each document's first token.
    documents: lengths [tokens], or None where the host does not know them, or a rank has parts.
    """

    starts: Tensor
    ends: Tensor
    batch: int
    documents: tuple[int, ...] | None = None

    @property
    def positions(self) -> Tensor:
        return self.ends - 1 - self.starts

    def routes(self, topk: int) -> Routes:
        """Which queries need a selection of topk keys."""
        if self.documents is None:
            return Routes.all_sparse(len(self.starts))
        return Routes.by_length(self.documents, topk)

    def share(self, rank: int, size: int) -> TokenRow:
        """The queries of one of `size` ranks, among which every sequence is shared contiguously."""

        def part(bound: Tensor) -> Tensor:
            return bound.view(self.batch, size, -1)[:, rank].flatten()

        return TokenRow(part(self.starts), part(self.ends), self.batch)

    def of_this_rank(self) -> TokenRow:
        """The tensor-parallel rank's share of the queries, as one row."""
        return TokenRow(of_this_rank(self.starts), of_this_rank(self.ends), batch=1)

    def flatten(self, x: Tensor) -> Tensor:
        """x [s, b, d] -> [b * s, d]."""
        return x.transpose(0, 1).reshape(-1, x.shape[-1])

    def unflatten(self, x: Tensor) -> Tensor:
        """x [b * s, d] -> [s, b, d]."""
        return row_major(x.view(self.batch, -1, x.shape[-1]).transpose(0, 1))


def token_row(
    seq_len: int, batch: int, packed_seq_params: PackedSeqParams | None, device: torch.device
) -> TokenRow:
    """The documents of this rank's seq_len x batch queries.

    cu_seqlens_q of thd inputs, whose batch is 1, counts the tokens of all context-parallel ranks.
    """
    cp_size = parallel_state.get_context_parallel_world_size()
    whole = whole_row(seq_len * cp_size, batch, packed_seq_params, device)
    if cp_size == 1:
        return whole
    return whole.share(parallel_state.get_context_parallel_rank(), cp_size)


def whole_row(
    seq_len: int, batch: int, packed_seq_params: PackedSeqParams | None, device: torch.device
) -> TokenRow:
    """The documents of seq_len x batch tokens, those of all context-parallel ranks."""
    documents: tuple[int, ...] | None = (seq_len,) * batch
    if packed_seq_params is not None:
        assert batch == 1, f"thd inputs have batch 1, got {batch}"
        cu_seqlens = packed_seq_params.cu_seqlens_q
        is_known = isinstance(packed_seq_params, PackedDocuments)
        documents = packed_seq_params.lengths if is_known else None
    else:
        cu_seqlens = torch.arange(batch + 1, dtype=torch.int32, device=device) * seq_len
    return TokenRow(*document_bounds(cu_seqlens, seq_len * batch), batch, documents)
