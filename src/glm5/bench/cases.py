"""The measured cases: sizes of GLM-5 in bf16, random inputs, and what each has to do."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from glm5.bench import plain
from glm5.bench.ceilings import Work
from glm5.bench.draw import draw_from
from glm5.bench.experts import EXPERTS, experts_problem
from glm5.bench.peers import Peers
from glm5.bench.problems import (
    OURS,
    PLAIN,
    Function,
    GradientProblem,
    Problem,
    SelectionProblem,
)
from glm5.bench.selections import drifting, random_causal
from glm5.ops import torch_backend
from glm5.ops.backends import get_backend
from glm5.ops.causal_attention import causal_attention
from glm5.ops.sparse_mla.selection import unions

D_QK, D_V, TOPK, SCALE = 576, 512, 2048, 1 / 16
D_DENSE = 256
INDEX_HEADS, INDEX_DIM = 32, 128


class _Attention(NamedTuple):
    case: str
    num_heads: int
    t_q: int
    t_k: int
    select: Callable[[int, int, int], Tensor] = random_causal
    with_mass: bool = False
    """The forward that also sums each key's attention over the heads."""


_ATTENTIONS = (
    _Attention("8K, 64 heads", 64, 8192, 8192),
    _Attention("8K, 8 heads", 8, 8192, 8192),
    _Attention("8K, 8 heads, drifting", 8, 8192, 8192, drifting),
    _Attention("1K of 8K, 64 heads", 64, 1024, 8192),
    _Attention("4K of 32K, drifting", 64, 4096, 32768, drifting),
    _Attention("document of 2K, 64 heads", 64, 2048, 2048),
    _Attention("8K, 64 heads, with mass", 64, 8192, 8192, with_mass=True),
    _Attention("8K, 8 heads, with mass", 8, 8192, 8192, with_mass=True),
    _Attention("4K of 32K, drifting, with mass", 64, 4096, 32768, drifting, with_mass=True),
)
_SHORT_DOCUMENTS = ([2048], [2048] * 4, [1999], [33, 100, 700, 1024, 1500, 2048], [97] * 40)
_INDEXER_LENGTHS = (8192, 32768)


def all_problems(peers: Peers, only: str = "") -> Iterator[Problem]:
    """Every case whose name holds `only`, made when it is asked for: one at a time in memory."""
    makers = _makers()
    for name in case_names(only):
        yield makers[name](peers)


def case_names(only: str = "") -> list[str]:
    """The names that hold `only`, in the order of all_problems."""
    return [name for name in _makers() if only in name]


def _makers() -> dict[str, Callable[[Peers], Problem]]:
    """How to make each case, by its name."""
    makers: dict[str, Callable[[Peers], Problem]] = {}
    for attention in _ATTENTIONS:
        makers[f"attention {attention.case}"] = partial(attention_problem, attention)
    for lengths in _SHORT_DOCUMENTS:
        makers[_dense_name(lengths)] = partial(dense_problem, lengths)
    for num_tokens in _INDEXER_LENGTHS:
        makers[f"indexer {num_tokens // 1024}K"] = partial(indexer_problem, num_tokens)
    makers["indexer loss 8K"] = partial(loss_problem, 8192)
    for experts in EXPERTS:
        makers[experts.name] = partial(experts_problem, experts)
    return makers


def _dense_name(lengths: list[int]) -> str:
    return f"{len(lengths)} x {min(lengths)} to {max(lengths)}, dense"


def attention_problem(case: _Attention, peers: Peers) -> GradientProblem:
    """sparse_mla, or sparse_mla_with_mass, on random queries and latent keys."""
    name, num_heads, t_q, t_k, select, with_mass = case
    draw = draw_from(name)
    q, kv, grad = draw(t_q, num_heads, D_QK), draw(t_k, D_QK), draw(t_q, num_heads, D_V)
    indices = select(t_q, t_k, TOPK)
    functions = _with_mass(peers) if with_mass else _without_mass(peers)
    pairs = int((indices >= 0).sum())
    products, row = pairs * num_heads, 2 * D_QK
    # Queries whose heads fit into one tile of 64 rows together need a key that they share once.
    sharing = min(16, max(1, 64 // num_heads))
    rows = int(unions(indices, t_k, sharing).lengths.sum())
    moved = q.nbytes + grad.nbytes + kv.nbytes + (2 if with_mass else 1) * indices.nbytes
    forward = Work(2 * (D_QK + D_V) * products, moved, row * rows)
    backward = Work(2 * (3 * D_QK + 2 * D_V) * products, 2 * moved, row * rows, 2 * row * rows)
    exact = torch_backend.sparse_mla_with_mass if with_mass else torch_backend.sparse_mla

    def bound(function: Function) -> Function:
        return lambda q, kv: function(q, kv, indices, SCALE, D_V)

    return GradientProblem(
        case=f"attention {name}",
        # The backward does not know of the mass.
        works={"forward": forward} | ({} if with_mass else {"backward": backward}),
        inputs=(q, kv),
        grad=grad,
        functions={who: bound(function) for who, function in functions.items()},
        exact=bound(exact),
        only=peers.only,
    )


def _without_mass(peers: Peers) -> dict[str, Function]:
    ours = get_backend(OURS).sparse_mla
    return {
        OURS: partial(ours, deterministic=False),
        f"{OURS} deterministic": partial(ours, deterministic=True),
        PLAIN: plain.sparse_mla,
        **peers.sparse_mla,
    }


def _with_mass(peers: Peers) -> dict[str, Function]:
    ours = get_backend(OURS).sparse_mla_with_mass
    return {
        OURS: partial(ours, deterministic=False),
        PLAIN: plain.sparse_mla_with_mass,
        **peers.sparse_mla_with_mass,
    }


def dense_problem(lengths: list[int], _: Peers) -> GradientProblem:
    """causal_attention of documents that select all their keys: 64 heads, unabsorbed."""
    num_heads, d = 64, D_DENSE
    draw = draw_from(lengths)
    q, k, v, grad = (draw(sum(lengths), num_heads, d) for _ in range(4))
    products = num_heads * sum(length * (length + 1) // 2 for length in lengths)

    def bound(function: Function) -> Function:
        return lambda *x: (function(*x, lengths, SCALE),)

    return GradientProblem(
        case=_dense_name(lengths),
        works={
            "forward": Work(4 * d * products, 4 * q.nbytes),
            "backward": Work(10 * d * products, 8 * q.nbytes),
        },
        inputs=(q, k, v),
        grad=grad,
        functions={OURS: bound(causal_attention), PLAIN: bound(plain.causal_attention)},
        exact=bound(plain.causal_attention),
    )


def indexer_problem(num_tokens: int, peers: Peers) -> SelectionProblem:
    """select_topk of one causal document."""
    draw = draw_from(num_tokens)
    q, k = draw(num_tokens, INDEX_HEADS, INDEX_DIM), draw(num_tokens, INDEX_DIM)
    weights = draw(num_tokens, INDEX_HEADS).float()
    ends = torch.arange(1, num_tokens + 1, dtype=torch.int32, device="cuda")
    starts = torch.zeros_like(ends)
    functions = {OURS: get_backend(OURS).select_topk, PLAIN: plain.select_topk} | peers.select_topk
    pairs = num_tokens * (num_tokens + 1) // 2

    def exact_scores(row: int) -> Tensor:
        similarity = torch.relu(q[row].double() @ k[: row + 1].double().t())
        return weights[row].double() @ similarity

    return SelectionProblem(
        case=f"indexer {num_tokens // 1024}K",
        works={"select": Work(2 * INDEX_HEADS * INDEX_DIM * pairs, q.nbytes + 4 * len(q) * TOPK)},
        functions={
            who: partial(function, q, k, weights, starts, ends, TOPK)
            for who, function in functions.items()
        },
        exact_scores=exact_scores,
        plain_scores=lambda row: plain.index_scores(
            q[row : row + 1], k[: row + 1], weights[row : row + 1]
        )[0],
        rows=[0, TOPK - 1, TOPK, TOPK + 1, num_tokens // 2 + 1, num_tokens - 1],
        topk=TOPK,
    )


def loss_problem(num_tokens: int, peers: Peers) -> GradientProblem:
    """indexer_kl over selected keys, with the mass of 64 heads, one causal document."""
    draw, num_heads = draw_from("loss"), 64
    index = draw(num_tokens, INDEX_HEADS, INDEX_DIM), draw(num_tokens, INDEX_DIM)
    # The scale of the model's own index weights keeps the softmax from saturating.
    weights = draw(num_tokens, INDEX_HEADS).float() * (INDEX_HEADS * INDEX_DIM) ** -0.5
    q, kv = draw(num_tokens, num_heads, D_QK), draw(num_tokens, D_QK)
    indices = random_causal(num_tokens, num_tokens, TOPK)
    attend = get_backend(OURS).sparse_mla_with_mass
    *_, mass = attend(q, kv, indices, SCALE, D_V, deterministic=False)
    pairs = int((indices >= 0).sum())

    def bound(function: Function) -> Function:
        return lambda *x: (function(*x, indices, mass),)

    functions: dict[str, Function] = {OURS: get_backend(OURS).indexer_kl, PLAIN: plain.indexer_kl}
    functions |= peers.indexer_kl
    row = 2 * INDEX_DIM
    return GradientProblem(
        case=f"indexer loss {num_tokens // 1024}K",
        works={
            "forward": Work(
                2 * pairs * INDEX_HEADS * INDEX_DIM,
                index[0].nbytes + 3 * indices.nbytes,
                pairs * row,
            ),
            "backward": Work(
                6 * pairs * INDEX_HEADS * INDEX_DIM,
                2 * (index[0].nbytes + indices.nbytes),
                pairs * row,
                2 * pairs * row,
            ),
        },
        inputs=(*index, weights),
        grad=torch.ones(num_tokens, device="cuda"),
        functions={who: bound(function) for who, function in functions.items()},
        exact=bound(torch_backend.indexer_kl),
    )
