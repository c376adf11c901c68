"""Every row is computed once, by one rank, in a shape that ranks agree on."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from megatron.core import parallel_state

from glm5.errors import DataError
from glm5.runtime.distributed import Layout, default_device, ensure_distributed
from glm5.train.batches import BatchShaper, context_share, token_multiple
from glm5.train.chat import TokenizedChat
from glm5.train.packing import PackedDataset

PAD = 99
Place = Callable[..., None]


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Place:
    """place(layout, dp=(rank, size), cp_rank=...): this process pretends to be that rank."""
    ensure_distributed(default_device())

    def pretend(layout: Layout, dp: tuple[int, int] = (0, 1), cp_rank: int = 0) -> None:
        answers = {
            "get_tensor_model_parallel_world_size": layout.tp,
            "get_pipeline_model_parallel_world_size": layout.pp,
            "get_virtual_pipeline_model_parallel_world_size": layout.vpp,
            "get_context_parallel_world_size": layout.cp,
            "get_context_parallel_rank": cp_rank,
            "get_expert_model_parallel_world_size": layout.ep,
            "get_expert_tensor_parallel_world_size": layout.etp,
            "get_data_parallel_rank": dp[0],
            "get_data_parallel_world_size": dp[1],
        }
        for name, value in answers.items():
            monkeypatch.setattr(parallel_state, name, lambda value=value: value)

    return pretend


def data(*lengths: int, seq_length: int) -> PackedDataset:
    """One row for each length, which is more than half of seq_length."""
    chats = [
        TokenizedChat(np.full(n, i, np.int32), np.ones(n, np.bool_), f"made:{i}")
        for i, n in enumerate(lengths)
    ]
    return PackedDataset(chats, seq_length)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("size", [1, 2])
def test_every_row_is_taken_once_and_ranks_have_equally_many(
    place: Place, ranks: int, count: int, size: int
) -> None:
    shares = []
    for rank in range(ranks):
        place(Layout(), dp=(rank, ranks))
        shares.append(BatchShaper(data(5, seq_length=5), size, PAD).share(range(count)))
    assert len({len(share) for share in shares}) == 1
    taken = [row for share in shares for rows in share for row in rows]
    assert sorted(taken) == list(range(count))
    # micro-batch i goes to rank i mod ranks, so the order over ranks is the order of the rows
    in_turn = [rows for turn in zip(*shares, strict=True) for rows in turn]
    assert [row for rows in in_turn for row in rows] == list(range(count))
    assert all(len(rows) <= size for rows in in_turn)


def test_a_rank_without_rows_computes_one_that_counts_nothing(place: Place) -> None:
    place(Layout(), dp=(1, 2))
    shaper = BatchShaper(data(5, 4, 3, seq_length=5), 1, PAD)
    shares = shaper.share(range(3))
    assert [list(rows) for rows in shares] == [[1], []]
    real, idle = shaper.micro_batches(shares)
    assert real.loss_mask.sum() > 0 and idle.loss_mask.sum() == 0
    assert idle.num_tokens > 0


@pytest.mark.parametrize(("count", "idle"), [(1, 1), (2, 0), (3, 1), (4, 0)])
def test_interleaved_stages_take_micro_batches_in_groups(
    place: Place, count: int, idle: int
) -> None:
    place(Layout(pp=2, vpp=2))
    shares = BatchShaper(data(5, seq_length=5), 1, PAD).share(range(count))
    assert [len(rows) for rows in shares] == [1] * count + [0] * idle
    # one stage after the other takes them as they come
    place(Layout(pp=2))
    assert len(BatchShaper(data(5, seq_length=5), 1, PAD).share(range(count))) == count


@pytest.mark.parametrize(
    ("layout", "rows", "capacity"),
    [
        (Layout(pp=2), 1, 7),
        (Layout(ep=2), 1, 7),
        (Layout(etp=2), 1, 7),
        (Layout(tp=2), 1, 8),
        (Layout(cp=2), 1, 8),
        (Layout(tp=2, cp=2), 1, 8),
        (Layout(tp=4, cp=3), 1, 12),
        (Layout(tp=2), 2, 14),
        (Layout(tp=4), 2, 16),
    ],
)
def test_split_models_pad_to_the_capacity(
    place: Place, layout: Layout, rows: int, capacity: int
) -> None:
    place(layout)
    shaper = BatchShaper(data(7, 5, 4, 6, seq_length=7), rows, PAD)
    assert shaper.capacity == capacity
    assert capacity % token_multiple() == 0
    plain = shaper.data[1]
    for row in shaper.micro_batches(shaper.share(range(4))):
        assert row.num_tokens == capacity
        assert row.cu_seqlens[-1] == capacity
    if rows == 1:
        padded = next(iter(shaper.micro_batches([[1]])))
        assert torch.equal(padded.input_ids[: plain.num_tokens], plain.input_ids)
        assert padded.input_ids[plain.num_tokens :].tolist() == [PAD] * (capacity - 5)
        assert padded.loss_mask.sum() == plain.loss_mask.sum()


@pytest.mark.parametrize("ranks", [1, 2])
def test_data_parallel_ranks_alone_pad_nothing(place: Place, ranks: int) -> None:
    place(Layout(), dp=(0, ranks))
    shaper = BatchShaper(data(7, 5, seq_length=7), 1, PAD)
    assert [row.num_tokens for row in shaper.micro_batches([[0], [1]])] == [7, 5]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_context_shares_are_contiguous_and_make_the_whole(place: Place, size: int) -> None:
    whole = torch.arange(12)
    shares = []
    for rank in range(size):
        place(Layout(cp=size), cp_rank=rank)
        shares.append(context_share(whole))
    assert torch.equal(torch.cat(shares), whole)
    assert {share.numel() for share in shares} == {12 // size}


def test_a_row_that_the_ranks_do_not_divide_is_refused(place: Place) -> None:
    place(Layout(cp=2))
    with pytest.raises(DataError, match=r"(?s)context-parallel.*11 tokens over 2 ranks"):
        context_share(torch.arange(11))
