"""The attention to each selected key, summed over the heads, that the forward hands out.

Without a GPU the kernels run in Triton's interpreter, which tests/conftest.py switches on.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    import tests.ops.triton_interpreter  # noqa: F401

from torch import Tensor

from glm5.errors import BackendError
from glm5.ops.sparse_mla import autograd, reference, with_mass
from glm5.ops.sparse_mla.portable import PortableKernels
from glm5.ops.sparse_mla.selection import Selection, one_by_one, unions
from glm5.ops.sparse_mla.tile_probs import TileProbs, TileShape
from tests.ops import oracles

SCALE = 0.3
FUNCTIONS = [reference.sparse_mla_with_mass, autograd.sparse_mla_with_mass]


def _selection(t_q: int, t_k: int, topk: int) -> Tensor:
    """As oracles.random_selection; the last row descends."""
    indices = oracles.random_selection(t_q, t_k, topk)
    if t_q:
        num_keys = int((indices[-1] >= 0).sum())
        indices[-1, :num_keys] = indices[-1, :num_keys].flip(0)
    return indices


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(
    ("t_q", "t_k", "h", "d_qk", "d_v", "topk"),
    [
        (2, 1, 1, 1, 1, 1),
        (4, 9, 3, 6, 6, 20),
        (5, 9, 17, 20, 17, 5),
        (3, 80, 33, 24, 16, 65),
        (3, 600, 2, 8, 8, 530),
        (0, 4, 2, 5, 4, 2),
        (3, 4, 2, 5, 4, 0),
        (3, 0, 2, 5, 4, 2),
    ],
)
def test_equals_softmaxes_summed_over_heads(
    function: Callable[..., Any], t_q: int, t_k: int, h: int, d_qk: int, d_v: int, topk: int
) -> None:
    q, kv, indices = torch.randn(t_q, h, d_qk), torch.randn(t_k, d_qk), _selection(t_q, t_k, topk)
    _, _, mass = function(q, kv, indices, SCALE, d_v)
    assert mass.dtype == torch.float32
    torch.testing.assert_close(
        mass.double(), oracles.mass(q, kv, indices, SCALE), atol=1e-5, rtol=1e-5
    )


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("module", [reference, autograd])
@pytest.mark.parametrize("deterministic", [False, True])
def test_the_attention_itself_does_not_change(module: Any, deterministic: bool) -> None:
    q, kv = torch.randn(5, 17, 20), torch.randn(9, 20)
    indices, grad, found = _selection(5, 9, 6), torch.randn(5, 17, 16), []
    for function in (module.sparse_mla, module.sparse_mla_with_mass):
        leaves = q.clone().requires_grad_(), kv.clone().requires_grad_()
        out, lse, *mass = function(*leaves, indices, SCALE, 16, deterministic=deterministic)
        assert not any(x.requires_grad for x in (lse, *mass))
        found.append([out.detach(), lse, *torch.autograd.grad(out, leaves, grad)])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_an_entry_without_a_key_between_others_gets_nothing(function: Callable[..., Any]) -> None:
    q, kv = torch.randn(2, 3, 6), torch.randn(5, 6)
    indices = torch.tensor([[4, -1, 1], [-1, -1, 2]], dtype=torch.int32)
    mass = function(q, kv, indices, SCALE, 4)[2]
    torch.testing.assert_close(
        mass.double(), oracles.mass(q, kv, indices, SCALE), atol=1e-5, rtol=1e-5
    )
    assert (mass[indices < 0] == 0).all()


class SharedTiles(PortableKernels):
    """Kernels whose tiles hold the heads of several queries, or some heads of one.

    Plain PyTorch, tile by tile; the kept probabilities are those that the Hopper kernel keeps.
    """

    together = 1

    def select(self, topk_indices: Tensor, h: int, num_keys: int) -> Selection:  # type: ignore[override]
        del h
        if self.together == 1:
            return one_by_one(topk_indices)
        return unions(topk_indices, num_keys, self.together)

    @staticmethod
    def tile_shape(q: Tensor, d_v: int) -> TileShape:
        del q, d_v
        return TileShape(64, 64)

    @staticmethod
    def forward_into(
        q: Tensor,
        kv: Tensor,
        selection: Selection,
        softmax_scale: float,
        out: Tensor,
        lse: Tensor,
        kept: TileProbs | None,
    ) -> None:
        assert kept is not None and len(kept.probs) == len(selection.lengths)
        h, queries_per_row = q.shape[1], selection.queries_per_row
        for row, length in enumerate(selection.lengths.tolist()):
            some = slice(row * queries_per_row, min((row + 1) * queries_per_row, len(q)))
            keys, heads = kv[selection.indices[row, :length].long()], q[some].flatten(0, 1)
            logits = heads @ keys.T * softmax_scale
            if selection.members is not None:
                query = torch.arange(len(heads)) // h
                chosen = selection.members[row, :length] >> query[:, None] & 1
                logits = logits.masked_fill(chosen == 0, -torch.inf)
            sums = logits.logsumexp(-1)
            probs = torch.exp(logits - sums[:, None]).nan_to_num(0)
            out[some] = (probs @ keys[:, : out.shape[2]]).unflatten(0, (-1, h))
            lse[some] = sums.unflatten(0, (-1, h))
            peak = torch.full_like(sums, -torch.inf)
            for tile, part in enumerate(logits.split(64, 1) if length else ()):
                peak = torch.maximum(peak, part.amax(1))
                values = torch.exp(part - peak[:, None]).nan_to_num(0)
                for i, some_rows in enumerate(torch.arange(len(heads)).split(64)):
                    place = row, i, tile, slice(0, len(some_rows))
                    kept.maxima[place] = peak[some_rows] / torch.tensor(2.0).log()
                    kept.probs[place][:, : part.shape[1]] = values[some_rows]


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("budget", [1, 2**29])
@pytest.mark.parametrize(
    ("h", "together"), [(1, 16), (5, 12), (8, 8), (17, 3), (32, 2), (64, 1), (65, 1), (128, 1)]
)
def test_heads_of_shared_and_of_several_tiles(
    h: int, together: int, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(with_mass, "PROB_BYTES", budget)
    t_q, t_k = 2 * together + 1, 200
    q, kv, indices = torch.randn(t_q, h, 6), torch.randn(t_k, 6), _selection(t_q, t_k, 150)
    kernels = SharedTiles()
    kernels.together = together
    results = autograd.attend_with_mass(kernels, q, kv, indices, SCALE, 4)
    expected = reference.sparse_mla_with_mass(q, kv, indices, SCALE, 4)
    for ours, theirs in zip(results, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_chunks_keep_to_the_budget_and_fill_the_processors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    q, shape, width = torch.empty(1, 64, 576).bfloat16(), TileShape(64, 64), 2048
    row_bytes = 64 * 2048 * 2 + 32 * 64 * 4
    monkeypatch.setattr(with_mass, "num_processors", lambda _: 132)
    chunks = {}
    for budget in (1, 100 * row_bytes, 300 * row_bytes, with_mass.PROB_BYTES):
        monkeypatch.setattr(with_mass, "PROB_BYTES", budget)
        chunks[budget // row_bytes] = with_mass._chunk(q, 64, width, shape)
    assert list(chunks.values()) == [1, 100, 264, 1980]
    assert all(rows <= max(1, most) for most, rows in chunks.items())
    kept = TileProbs.empty(q, 1, 64, width, shape)
    assert sum(x.nbytes for x in kept) == row_bytes


def test_what_the_kernels_do_not_take_is_refused() -> None:
    q, kv = torch.randn(2, 1, 4), torch.randn(3, 4)
    indices = torch.zeros(2, 1, dtype=torch.int32)
    with pytest.raises(BackendError, match="dtype"):
        autograd.sparse_mla_with_mass(q.double(), kv.double(), indices, SCALE, 4)
    for function in FUNCTIONS:
        with pytest.raises(BackendError, match="do not fit together"):
            function(q, kv, indices[:1], SCALE, 4)


@pytest.mark.gpu
@pytest.mark.parametrize("h", [1, 5, 8, 17, 63, 64, 65, 128])
@pytest.mark.parametrize(("d_qk", "d_v"), [(576, 512), (80, 64)])
@pytest.mark.parametrize("chunk_rows", [4, 10**6])
def test_bf16_error_is_at_most_twice_that_of_plain_pytorch(
    h: int, d_qk: int, d_v: int, chunk_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of up to 300 keys, about half of which neighbours share, over poisoned memory."""
    monkeypatch.setattr(with_mass, "_chunk", lambda *_: chunk_rows)
    t_q, t_k = 70, 400
    q, kv = torch.randn(t_q, h, d_qk).bfloat16(), torch.randn(t_k, d_qk).bfloat16()
    indices, scale = _selection(t_q, t_k, 300).cuda(), d_qk**-0.5
    q, kv = q.cuda(), kv.cuda()
    exact = reference.sparse_mla_with_mass(q.double(), kv.double(), indices, scale, d_v)
    logits = torch.einsum("thd,tnd->thn", q, kv[indices.clamp(min=0).long()]) * scale
    logits = logits.masked_fill((indices < 0)[:, None], -torch.inf)
    naive = torch.softmax(logits, -1).nan_to_num(0).sum(1)
    torch.full((2**28,), torch.nan, device="cuda")  # left behind for what is kept
    results = [autograd.sparse_mla_with_mass(q, kv, indices, scale, d_v) for _ in range(2)]
    plain = autograd.sparse_mla(q, kv, indices, scale, d_v)
    assert all(map(torch.equal, results[0], results[1]))
    assert all(map(torch.equal, results[0][:2], plain))
    mass, true = results[0][2].double(), exact[2]
    assert (mass[indices < 0] == 0).all() and mass.isfinite().all()
    bound = 2 * (naive.double() - true).abs().max() + torch.finfo(torch.bfloat16).eps * true.max()
    assert (mass - true).abs().max() <= bound
    # Sums of h rounded terms are closer than one of them.
    assert (mass - true).norm() <= 3e-3 * true.norm()
