"""Documents of at most topk tokens attend densely; rows are taken and joined in order."""

import pytest
import torch

from glm5.model.routes import Routes, Run


def test_documents_are_grouped_by_how_they_attend() -> None:
    routes = Routes.by_length([3, 8, 0, 9, 1, 20, 21], topk=8)
    assert routes.runs == (
        Run(True, (3, 8)),
        Run(False, (9,)),
        Run(True, (1,)),
        Run(False, (20, 21)),
    )
    assert routes.dense_lengths == (3, 8, 1)
    assert routes.num_sparse == 50


@pytest.mark.parametrize("documents", [[3, 8], [9, 20], [3, 9], [9, 3, 10, 1, 2]])
def test_join_undoes_take(documents: list[int]) -> None:
    routes = Routes.by_length(documents, topk=8)
    x = torch.randn(sum(documents), 2)
    dense, sparse = routes.take(x, dense=True), routes.take(x, dense=False)
    assert len(dense) == sum(routes.dense_lengths)
    assert len(sparse) == routes.num_sparse
    assert torch.equal(routes.join(dense, sparse), x)


def test_rows_of_one_kind_are_not_copied() -> None:
    x = torch.randn(7, 2)
    routes = Routes.by_length([3, 4], topk=8)
    assert routes.take(x, dense=True).data_ptr() == x.data_ptr()
    assert routes.take(x, dense=False).shape == (0, 2)


def test_unknown_documents_are_all_sparse() -> None:
    routes = Routes.all_sparse(5)
    assert (routes.num_sparse, routes.dense_lengths) == (5, ())


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_rank_has_every_size_th_query(size: int) -> None:
    routes = Routes.by_length([3, 9, 8, 11, 1], topk=8)
    numbers = torch.arange(32)
    for rank in range(size):
        own = routes.of_rank(rank, size)
        for dense in (True, False):
            taken = routes.take(numbers, dense=dense)
            expected = taken[taken % size == rank]
            assert torch.equal(own.take(numbers[rank::size], dense=dense), expected)
        assert [run.dense for run in own.runs] == [run.dense for run in routes.runs]
