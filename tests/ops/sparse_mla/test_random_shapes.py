"""Fifty random shapes over NaN-poisoned memory: fp32 in the interpreter, bf16 too on a GPU."""

from functools import partial

import pytest
import torch

if not torch.cuda.is_available():
    import tests.ops.triton_interpreter  # noqa: F401

from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from glm5.ops.sparse_mla import reference
from glm5.ops.sparse_mla.autograd import sparse_mla_with_mass
from tests.ops import oracles
from tests.ops.random_shapes import random_shapes

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
# A kernel is compiled for each; the interpreter takes time by size.
WIDTHS = [(576, 512), (80, 64), (33, 33)] if ON_GPU else [(24, 16), (20, 17), (5, 5)]
HEADS = [1, 3, 8, 17, 64, 65, 128] if ON_GPU else [1, 3, 17]
MOST_QUERIES, MOST_KEYS = (200, 400) if ON_GPU else (6, 40)
DTYPES = [torch.float32, torch.bfloat16] if ON_GPU else [torch.float32]


def _run(function, q: Tensor, kv: Tensor, indices: Tensor, scale: float, d_v: int, grad: Tensor):
    q, kv = (x.detach().clone().requires_grad_() for x in (q, kv))
    out, lse, mass = function(q, kv, indices, scale, d_v)
    return out.detach(), lse.detach(), mass.detach(), *torch.autograd.grad(out, (q, kv), grad)


def _naive(q: Tensor, kv: Tensor, indices: Tensor, scale: float, d_v: int):
    """Plain PyTorch in the inputs' dtype; empty rows give 0."""
    mask = torch.zeros(len(q), len(kv) + 1, dtype=torch.bool, device=q.device)
    mask.scatter_(1, indices.long().where(indices >= 0, len(kv)), True)
    mask = mask[:, None, :-1]
    logits = (torch.einsum("thd,sd->ths", q, kv) * scale).masked_fill(~mask, -torch.inf)
    probs = torch.softmax(logits, -1).masked_fill(~mask, 0)
    mass = torch.nn.functional.pad(probs.sum(1), (0, 1))
    mass = mass.gather(1, indices.long().where(indices >= 0, len(kv)))
    return probs @ kv[:, :d_v], torch.logsumexp(logits.float(), -1), mass


@random_shapes(50)
@given(data=st.data())
def test_random_shapes(data: st.DataObject, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue("poisoned_empty")
    t_q = data.draw(st.integers(0, MOST_QUERIES), "t_q")
    t_k = data.draw(st.integers(1, MOST_KEYS), "t_k")
    topk = data.draw(st.integers(1, MOST_KEYS), "topk")
    h = data.draw(st.sampled_from(HEADS), "h")
    d_qk, d_v = data.draw(st.sampled_from(WIDTHS), "d_qk, d_v")
    dtype = data.draw(st.sampled_from(DTYPES), "dtype")
    deterministic = data.draw(st.booleans(), "deterministic")
    torch.manual_seed(data.draw(st.integers(0, 2**31), "seed"))
    indices = oracles.random_selection(t_q, t_k, topk).to(DEVICE)
    q, kv = torch.randn(t_q, h, d_qk).to(DEVICE, dtype), torch.randn(t_k, d_qk).to(DEVICE, dtype)
    grad, scale = torch.randn(t_q, h, d_v).to(DEVICE, dtype), d_qk**-0.5
    wide = q.double(), kv.double(), indices, scale, d_v, grad.double()
    exact = _run(reference.sparse_mla_with_mass, *wide)
    naive = _run(_naive, q, kv, indices, scale, d_v, grad)
    function = partial(sparse_mla_with_mass, deterministic=deterministic)
    ours = _run(function, q, kv, indices, scale, d_v, grad)
    # of one key the gradients are differences of equal terms, of about this size
    term = scale * grad.abs().max() * kv.abs().max() ** 2 * d_v**0.5 if t_q else 0.0
    floor = 32 * torch.finfo(torch.float32).eps * float(term)
    for mine, theirs, true in zip(ours, naive, exact, strict=True):
        finite = true.isfinite()
        assert torch.equal(mine.isfinite(), finite)
        if not finite.any():
            continue
        rounding = torch.finfo(mine.dtype).eps * true[finite].abs().max()
        my_error, their_error = ((x.double() - true)[finite].abs().max() for x in (mine, theirs))
        assert my_error <= 2 * their_error + 4 * rounding + floor
