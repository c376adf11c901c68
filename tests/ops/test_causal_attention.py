"""Dense attention of packed documents against the reference over all earlier keys."""

import pytest
import torch
from torch import Tensor

from glm5.ops.causal_attention import causal_attention
from glm5.ops.sparse_mla.reference import sparse_mla

SCALE = 0.3


def _inputs(lengths: list[int], h: int, d_qk: int, d_v: int) -> list[Tensor]:
    t = sum(lengths)
    return [torch.randn(t, h, d).double() for d in (d_qk, d_qk, d_v)]


def _exact(q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> Tensor:
    """Each document by itself, by a plain softmax over a lower triangle."""
    outs = []
    for q_d, k_d, v_d in zip(*(x.split(lengths) for x in (q, k, v)), strict=True):
        logits = torch.einsum("thd,shd->hts", q_d, k_d) * SCALE
        above = torch.ones(logits.shape[1:], device=q.device).triu(1).bool()
        outs.append(
            torch.einsum("hts,shd->thd", logits.masked_fill(above, -torch.inf).softmax(-1), v_d)
        )
    return torch.cat(outs)


def _run(function, tensors: list[Tensor], lengths: list[int], grad: Tensor, *rest: float):
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    out = function(*leaves, lengths, *rest)
    return out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))


@pytest.mark.parametrize("lengths", [[1], [7], [3, 1, 1, 9], [130]])
@pytest.mark.parametrize(("h", "d_qk", "d_v"), [(1, 1, 1), (3, 6, 4), (2, 8, 8)])
def test_equals_a_plain_softmax(lengths: list[int], h: int, d_qk: int, d_v: int) -> None:
    tensors = _inputs(lengths, h, d_qk, d_v)
    grad = torch.randn(sum(lengths), h, d_v)
    expected = _run(_exact, tensors, lengths, grad)
    for dtype, atol in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        ours = _run(causal_attention, [x.to(dtype) for x in tensors], lengths, grad, SCALE)
        for mine, true in zip(ours, expected, strict=True):
            assert mine.dtype == dtype
            torch.testing.assert_close(mine.double(), true.double(), atol=atol, rtol=atol)


def test_equals_the_absorbed_attention_over_all_keys() -> None:
    """With one head's keys for all, and values that are a part of them, both are one formula."""
    lengths = [5, 2]
    q, kv = torch.randn(7, 3, 6).double(), torch.randn(7, 6).double()
    keys = kv[:, None].expand(-1, 3, -1)
    starts = torch.tensor([0] * 5 + [5] * 2)
    indices = starts[:, None] + torch.arange(5)
    indices = indices.where(indices <= torch.arange(7)[:, None], -1).int()
    expected, _ = sparse_mla(q, kv, indices, SCALE, 4)
    torch.testing.assert_close(causal_attention(q, keys, keys[..., :4], lengths, SCALE), expected)


def test_lengths_that_are_not_those_of_the_tokens_are_our_bug() -> None:
    q, k, v = _inputs([4], 1, 2, 2)
    for lengths in ([3], [5], [4, 0]):
        with pytest.raises(AssertionError, match="are not the documents of 4"):
            causal_attention(q, k, v, lengths, SCALE)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("d", [256, 24])
def test_on_a_gpu_without_a_wait(dtype: torch.dtype, d: int) -> None:
    """Short and long documents, of lengths that are padded, over NaN and without a host sync."""
    lengths = [1, 769, 40, 768, 900, 3, 1024]
    tensors, grad = _inputs(lengths, 4, d, d), torch.randn(sum(lengths), 4, d)
    expected = _run(_exact, [x.cuda() for x in tensors], lengths, grad.cuda())
    naive = _run(_exact, [x.to("cuda", dtype) for x in tensors], lengths, grad.cuda())
    inputs, grad = [x.to("cuda", dtype) for x in tensors], grad.cuda()
    torch.full((2**26,), torch.nan, device="cuda")  # left behind for the outputs to be written in
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        ours = _run(causal_attention, inputs, lengths, grad, SCALE)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for mine, theirs, true in zip(ours, naive, expected, strict=True):
        rounding = torch.finfo(dtype).eps * true.abs().max()
        my_error, their_error = ((x.double() - true).abs().max() for x in (mine, theirs))
        assert my_error <= 2 * their_error + rounding
