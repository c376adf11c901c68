"""Micro-batches by a budget of tokens, shared out evenly."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron.core import parallel_state

from glm5.rl import batch
from glm5.rl.batch import PolicyBatcher, plan_step, split_updates
from glm5.rl.row import Document
from glm5.runtime.distributed import Layout
from tests.rl.rollouts import LENGTHS, made_rollout

DOCUMENTS = [Document(n, made_rollout(n % len(LENGTHS)), 1.0) for n in range(15)]


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three data-parallel ranks."""
    monkeypatch.setattr(parallel_state, "get_data_parallel_world_size", lambda: 3)
    monkeypatch.setattr(batch, "micro_batches_together", lambda: 1)
    monkeypatch.setattr(batch, "token_multiple", lambda: 4)
    monkeypatch.setattr(batch, "current_layout", Layout)


def test_every_completion_is_in_one_micro_batch(ranks: None) -> None:
    shares = PolicyBatcher(20, 0).share(DOCUMENTS)
    assert len(shares) == 3 and len({len(share) for share in shares}) == 1
    micro_batches = [documents for share in shares for documents in share]
    assert all(sum(d.num_tokens for d in documents) <= 20 for documents in micro_batches)
    numbers = sorted(d.number for documents in micro_batches for d in documents)
    assert numbers == list(range(15))
    # the empty ones are as few as can be
    assert sum(not documents for documents in micro_batches) < 3


def test_interleaved_stages_take_them_in_groups(
    ranks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "micro_batches_together", lambda: 4)
    assert {len(share) % 4 for share in PolicyBatcher(20, 0).share(DOCUMENTS)} == {0}


def test_rows_are_padded_only_where_ranks_exchange_tokens(
    ranks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    batcher = PolicyBatcher(18, 0)
    assert batcher.capacity == 20
    assert batcher.row(DOCUMENTS[:1]).packed.num_tokens == DOCUMENTS[0].num_tokens
    for layout in (Layout(tp=2), Layout(pp=2), Layout(cp=2), Layout(ep=2)):
        monkeypatch.setattr(batch, "current_layout", lambda layout=layout: layout)
        assert batcher.row(DOCUMENTS[:1]).packed.num_tokens == 20
        assert batcher.row([]).packed.num_tokens == 20


def test_updates_have_groups_of_their_own(ranks: None) -> None:
    groups = [DOCUMENTS[start : start + 3] for start in range(0, 15, 3)]
    plan = plan_step(PolicyBatcher(20, 0), groups, 2)
    by_update = [
        sorted(d.number for share in update for documents in share for d in documents)
        for update in plan.updates
    ]
    assert by_update == [list(range(6)), list(range(6, 15))]
    assert sorted(n for rank in range(3) for n in plan.numbers(rank)) == list(range(15))
    assert plan_step(PolicyBatcher(20, 0), [], 2).updates == ()


@given(st.integers(0, 30), st.integers(1, 12))
def test_parts_are_equal_and_never_empty(size: int, count: int) -> None:
    parts = split_updates(range(size), count)
    assert [item for part in parts for item in part] == list(range(size))
    assert len(parts) == min(size, count)
    lengths = {len(part) for part in parts}
    assert 0 not in lengths and (not lengths or max(lengths) - min(lengths) <= 1)
