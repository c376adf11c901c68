"""A step's loss is the same however its tokens are cut into micro-batches, ranks and shares."""

import pytest
import torch
from torch import Tensor

from glm5.rl.loss_weights import Normalise, loss_weights, weighted_sum
from tests.tiny_models import edges

# document -> (tokens, of which the last so many predict a response); the last but one is padding
DOCUMENTS = ((5, 3), (4, 1), (7, 6), (3, 2), (1, 0), (6, 4))
ROWS = ((0, 1, 2), (3, 4, 5))


def row(documents: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """(mask, cu_seqlens); as with labels, a document's last token predicts nothing."""
    masks = []
    for document in documents:
        length, responses = DOCUMENTS[document]
        mask = torch.zeros(length, dtype=torch.bool)
        mask[length - 1 - responses : length - 1] = True
        masks.append(mask)
    return torch.cat(masks), edges([DOCUMENTS[document][0] for document in documents])


def losses_of(mask: Tensor, seed: int = 0) -> Tensor:
    values = torch.rand(mask.shape, generator=torch.Generator().manual_seed(seed))
    return torch.where(mask, values, 0)


def expected(losses: Tensor, normalise: Normalise) -> float:
    """By the definition, document by document."""
    parts, start = [], 0
    for length, responses in DOCUMENTS:
        part = losses[start : start + length]
        parts += [part[length - 1 - responses : length - 1].double()] if responses else []
        start += length
    if normalise == "token":
        return float(torch.cat(parts).mean())
    return float(torch.stack([part.mean() for part in parts]).mean())


def total(pieces: list[tuple[Tensor, Tensor, Tensor]]) -> float:
    sums = [weighted_sum(*piece) for piece in pieces]
    return float(sum(loss.double() for loss, _ in sums)) / sum(int(count) for _, count in sums)


@pytest.mark.parametrize("normalise", ["token", "sequence"])
def test_a_whole_step_in_one_row_is_the_definition(normalise: Normalise) -> None:
    mask, cu_seqlens = row(tuple(range(len(DOCUMENTS))))
    losses = losses_of(mask)
    found = total([(losses, *loss_weights(mask, cu_seqlens, normalise))])
    assert found == pytest.approx(expected(losses, normalise), rel=1e-6)


def test_the_two_are_not_the_same() -> None:
    losses = losses_of(row(tuple(range(len(DOCUMENTS))))[0])
    assert abs(expected(losses, "token") - expected(losses, "sequence")) > 0.01


@pytest.mark.parametrize("normalise", ["token", "sequence"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
def test_cuts_change_nothing(normalise: Normalise, ranks: int) -> None:
    whole_mask, _ = row(tuple(range(len(DOCUMENTS))))
    losses = losses_of(whole_mask)
    pieces, start = [], 0
    for documents in ROWS:
        mask, cu_seqlens = row(documents)
        weights, counts = loss_weights(mask, cu_seqlens, normalise)
        part = losses[start : start + len(mask)]
        start += len(mask)
        shares = (x.tensor_split(ranks) for x in (part, weights, counts))
        pieces += list(zip(*shares, strict=True))
    assert len(pieces) == 2 * ranks
    assert total(pieces) == pytest.approx(expected(losses, normalise), rel=1e-6)


@pytest.mark.parametrize("normalise", ["token", "sequence"])
def test_a_row_without_responses_adds_nothing(normalise: Normalise) -> None:
    weights, counts = loss_weights(torch.zeros(6, dtype=torch.bool), edges([4, 1, 1]), normalise)
    assert weights.tolist() == [0.0] * 6
    loss, count = weighted_sum(torch.zeros(6), weights, counts)
    assert float(loss) == 0 and int(count) == 0 and count.dtype == torch.int32
