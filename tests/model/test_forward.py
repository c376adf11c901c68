"""Documents, batches and prefixes: who sees whom, at every length around topk."""

from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from glm5.checkpoint.load import load_model
from glm5.errors import DataError
from glm5.model.forward import logits
from tests.tiny_models import (
    TinyFolder,
    assert_all_close,
    assert_close,
    draw_tokens,
    edges,
    gradients,
    probe_loss,
)

TOPK = 8
LENGTHS = (1, TOPK - 1, 3 * TOPK + 2, TOPK, 2, TOPK + 1)


@pytest.fixture(scope="module", params=[("5", "torch"), ("5.2", "torch"), ("5.2", "megatron")])
def model(request: pytest.FixtureRequest, tiny_folder: TinyFolder) -> GPTModel:
    variant, backend = request.param
    model = load_model(tiny_folder(variant), backend=backend)
    assert model.config.glm5.index_topk == TOPK
    return model


def batched(model: GPTModel, rows: Tensor) -> Tensor:
    """bshd: rows [b, s] -> logits [b, s, vocab]."""
    positions = torch.arange(rows.shape[1]).expand_as(rows)
    return model(rows, positions, attention_mask=None)


@torch.no_grad()
def test_packed_documents_equal_each_alone(model: GPTModel) -> None:
    token_ids = draw_tokens(sum(LENGTHS))
    together = logits(model, token_ids, edges(LENGTHS))
    assert together.shape == (sum(LENGTHS), model.config.glm5.vocab_size)
    alone = [logits(model, part) for part in token_ids.split(LENGTHS)]
    for length, part, single in zip(LENGTHS, together.split(LENGTHS), alone, strict=True):
        assert_close(part, single, 2e-6, f"length {length}")


def test_packed_gradients_are_the_sum_over_the_documents(model: GPTModel) -> None:
    token_ids = draw_tokens(sum(LENGTHS))
    model.zero_grad(set_to_none=True)
    out = logits(model, token_ids, edges(LENGTHS))
    weights = torch.randn(out.shape)
    (out * weights).sum().backward()
    together = gradients(model)
    model.zero_grad(set_to_none=True)
    for part, weight in zip(token_ids.split(LENGTHS), weights.split(LENGTHS), strict=True):
        (logits(model, part) * weight).sum().backward()
    assert_all_close(gradients(model), together, 1e-5)


@pytest.mark.parametrize("length", [1, TOPK - 1, TOPK, TOPK + 1, 3 * TOPK])
@torch.no_grad()
def test_a_batch_equals_its_packed_documents(model: GPTModel, length: int) -> None:
    rows = draw_tokens(2 * length).view(2, length)
    packed = logits(model, rows.flatten(), edges([length, length]))
    assert_close(batched(model, rows).flatten(0, 1), packed)


@torch.no_grad()
def test_empty_documents_change_nothing(model: GPTModel) -> None:
    token_ids = draw_tokens(12)
    plain = logits(model, token_ids, edges([5, 7]))
    assert_close(logits(model, token_ids, edges([0, 5, 0, 0, 7, 0])), plain)


@torch.no_grad()
def test_one_document_is_the_default(model: GPTModel) -> None:
    token_ids = draw_tokens(11)
    assert torch.equal(logits(model, token_ids), logits(model, token_ids, edges([11])))


@pytest.mark.parametrize("kept", [1, TOPK - 1, TOPK, TOPK + 1, 2 * TOPK + 3])
@torch.no_grad()
def test_a_prefix_does_not_depend_on_what_follows(model: GPTModel, kept: int) -> None:
    token_ids = draw_tokens(3 * TOPK)
    whole = logits(model, token_ids)[:kept]
    assert_close(logits(model, token_ids[:kept]), whole, 2e-6)
    other = torch.cat([token_ids[:kept], draw_tokens(3 * TOPK - kept, seed=1)])
    assert_close(logits(model, other)[:kept], whole, 2e-6)


def test_the_future_gets_no_gradient(model: GPTModel) -> None:
    seen, unseen = draw_tokens(2 * TOPK, high=100), draw_tokens(5, low=100)
    model.zero_grad(set_to_none=True)
    probe_loss(logits(model, torch.cat([seen, unseen]))[: 2 * TOPK]).backward()
    touched = model.embedding.word_embeddings.weight.grad.abs().sum(1) > 0
    assert touched[seen.unique()].all()
    assert not touched[100:].any()


@pytest.mark.parametrize("length_b", [1, TOPK, 3 * TOPK])
def test_a_document_never_changes_another(model: GPTModel, length_b: int) -> None:
    """Not its logits, not its gradients; and its loss sends nothing to the other's tokens."""
    length_a = 2 * TOPK + 1
    b, cut = draw_tokens(length_b, high=100), edges([length_a, length_b])
    results = []
    for seed in (0, 1):
        a = draw_tokens(length_a, low=100, seed=seed)
        model.zero_grad(set_to_none=True)
        out = logits(model, torch.cat([a, b]), cut)[length_a:]
        probe_loss(out).backward()
        touched = model.embedding.word_embeddings.weight.grad.abs().sum(1) > 0
        assert touched[b.unique()].all()
        assert not touched[100:].any()
        results.append((out.detach(), gradients(model)))
    assert_close(results[1][0], results[0][0])
    # a query with one key has no gradient but rounding
    assert_all_close(results[1][1], results[0][1], 1e-5, floor=0.1 if length_b == 1 else 0.0)


def test_the_same_input_gives_the_same_bits(model: GPTModel) -> None:
    token_ids, cut = draw_tokens(30), edges([21, 9])
    first = logits(model, token_ids, cut)
    assert torch.equal(logits(model, token_ids, cut), first)


@pytest.mark.parametrize("cut", [[0, 4], [0, 7], [1, 5], [5], [0, 3, 2, 5], [0, -1, 5]], ids=str)
def test_documents_that_do_not_span_the_tokens_are_refused(model: GPTModel, cut: list[int]) -> None:
    with pytest.raises(DataError, match="does not describe packed documents"):
        logits(model, draw_tokens(5), torch.tensor(cut))


@pytest.mark.parametrize(
    "token_ids", [torch.zeros(2, 3, dtype=torch.long), torch.zeros(0).long(), torch.zeros(4)]
)
def test_token_ids_are_one_row_of_integers(model: GPTModel, token_ids: Tensor) -> None:
    with pytest.raises(DataError, match="not one row of integers"):
        logits(model, token_ids)


@pytest.mark.parametrize("outside", [-1, 320])
def test_token_ids_belong_to_the_vocabulary(model: GPTModel, outside: int) -> None:
    with pytest.raises(DataError, match=f"(?s)outside the vocabulary.*{outside}.*0 to 319"):
        logits(model, torch.tensor([3, outside, 4]))


NO_IDS = {
    "a list": [1, 2],
    "numpy": np.array([1, 2]),
    "None": None,
    "a mask": torch.tensor([True, False]),
    "complex": torch.tensor([1j]),
    "real": torch.tensor([1.0]),
}


@pytest.mark.parametrize("kind", NO_IDS)
def test_what_is_no_row_of_ids_is_refused(model: GPTModel, kind: str) -> None:
    given: Any = NO_IDS[kind]
    reason = "not one row of integers" if isinstance(given, Tensor) else "not a tensor"
    with pytest.raises(DataError, match=f"token_ids is {reason}"):
        logits(model, given)


def test_cu_seqlens_is_a_tensor_too(model: GPTModel) -> None:
    cut: Any = [0, 2]
    with pytest.raises(DataError, match=r"(?s)cu_seqlens is not a tensor.*list"):
        logits(model, torch.tensor([1, 2]), cut)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.uint16, torch.uint32], ids=str)
@torch.no_grad()
def test_ids_of_any_integer_type(model: GPTModel, dtype: torch.dtype) -> None:
    token_ids = torch.tensor([3, 1, 200 if dtype == torch.uint8 else 299])
    assert torch.equal(logits(model, token_ids.to(dtype)), logits(model, token_ids))
