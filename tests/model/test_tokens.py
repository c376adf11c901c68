"""Both input layouts become one row of packed documents."""

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from glm5.model.tokens import token_row
from glm5.runtime.distributed import default_device, ensure_distributed

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _one_process() -> None:
    ensure_distributed(default_device())


def packed(*cu_seqlens: int) -> PackedSeqParams:
    edges = torch.tensor(cu_seqlens, dtype=torch.int32)
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=edges, cu_seqlens_kv=edges)


def test_packed_documents_keep_their_bounds() -> None:
    row = token_row(5, 1, packed(0, 3, 3, 4, 5), CPU)
    assert row.starts.tolist() == [0, 0, 0, 3, 4]
    assert row.ends.tolist() == [1, 2, 3, 4, 5]
    assert row.positions.tolist() == [0, 1, 2, 0, 0]
    assert row.batch == 1


def test_a_batch_is_documents_of_one_length() -> None:
    row = token_row(3, 2, None, CPU)
    assert row.starts.tolist() == [0, 0, 0, 3, 3, 3]
    assert row.positions.tolist() == [0, 1, 2, 0, 1, 2]
    assert row.starts.dtype == row.ends.dtype == row.positions.dtype == torch.int32


@pytest.mark.parametrize(("seq_len", "batch"), [(1, 1), (3, 1), (1, 4), (3, 2)])
def test_flatten_is_undone(seq_len: int, batch: int) -> None:
    x = torch.randn(seq_len, batch, 4)
    row = token_row(seq_len, batch, None, CPU)
    flat = row.flatten(x)
    # document after document, not position after position
    assert torch.equal(flat, torch.cat([x[:, b] for b in range(batch)]))
    assert torch.equal(row.unflatten(flat), x)
    assert row.unflatten(flat.repeat(1, 2)).shape == (seq_len, batch, 8)


def test_packed_rows_have_batch_one() -> None:
    with pytest.raises(AssertionError, match="batch 1"):
        token_row(4, 2, packed(0, 4), CPU)
