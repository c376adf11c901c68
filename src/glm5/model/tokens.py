"""The two input layouts of Megatron-Core, seen as one row of packed documents."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from glm5.ops.masks import document_bounds


@dataclass(frozen=True)
class TokenRow:
    """Documents of one micro-batch, end to end: bshd is b documents of s tokens, thd is cu_seqlens.

    starts, ends [t] int32: token i attends to [starts[i], ends[i]); positions [t] int32 count from
    each document's first token.
    """

    starts: Tensor
    ends: Tensor
    batch: int

    @property
    def positions(self) -> Tensor:
        return self.ends - 1 - self.starts

    def flatten(self, x: Tensor) -> Tensor:
        """x [s, b, d] -> [b * s, d]."""
        return x.transpose(0, 1).reshape(-1, x.shape[-1])

    def unflatten(self, x: Tensor) -> Tensor:
        """x [b * s, d] -> [s, b, d]."""
        return x.view(self.batch, -1, x.shape[-1]).transpose(0, 1)


def token_row(hidden_states: Tensor, packed_seq_params: PackedSeqParams | None) -> TokenRow:
    """The documents of hidden_states: bshd [s, b, hidden_size], or thd [t, 1, hidden_size]."""
    seq_len, batch, _ = hidden_states.shape
    if packed_seq_params is not None:
        assert batch == 1, f"thd inputs have batch 1, got {batch}"
        cu_seqlens = packed_seq_params.cu_seqlens_q
    else:
        device = hidden_states.device
        cu_seqlens = torch.arange(batch + 1, dtype=torch.int32, device=device) * seq_len
    starts, ends = document_bounds(cu_seqlens, seq_len * batch)
    return TokenRow(starts, ends, batch)
