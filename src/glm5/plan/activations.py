"""Bytes that one micro-batch's activations take on a rank, counted from what the layers do.

Every count is of one decoder layer in bf16 and follows the code of glm5.model and of
Megatron-Core's MLP and MoE layers line by line; tests compare it with what a run allocates. Tensors
below a thousandth of the layer are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from glm5.config import Glm5Config
from glm5.ops.sparse_mla.tile_probs import PROB_BYTES
from glm5.plan.workload import Workload
from glm5.runtime.distributed import Layout

BF16, FP32, INT32, INT64 = 2, 4, 4, 8


@dataclass(frozen=True)
class Shapes:
    """Numbers of tokens and widths of one rank."""

    tokens: int
    """Of a micro-batch, on one context-parallel rank."""
    shard: int
    """Of those, the tokens of one tensor-parallel rank outside attention and MLP."""
    keys: int
    """Of the whole row."""
    heads: int
    routed: int
    """(token, expert) pairs that this rank's experts compute, if they are equally liked."""
    alltoall: bool
    """Whether routed tokens travel, so that they exist once more."""


def shapes(c: Glm5Config, layout: Layout, work: Workload) -> Shapes:
    """For one row per micro-batch."""
    tokens = -(-work.seq_len // layout.cp)
    shard = -(-tokens // layout.tp)
    heads = c.num_attention_heads // layout.tp
    # ranks that share the width of an expert all compute each other's tokens
    routed = shard * c.num_experts_per_tok * layout.etp
    return Shapes(tokens, shard, tokens * layout.cp, heads, routed, layout.ep * layout.etp > 1)


@dataclass(frozen=True)
class LayerBytes:
    """Activations of one layer, on a rank."""

    kept: int
    """From the forward to the backward pass, when nothing is recomputed."""
    kept_core: int
    """Of those, what recomputing the attention core drops."""
    kept_mlp: int
    """Of those, what recomputing the MLP or the experts drops."""
    passing: int
    """Live at once beside what is kept, at the fullest moment."""
    entry: int
    """The layer's input: all that full recompute keeps."""


def layer_bytes(
    c: Glm5Config, s: Shapes, layout: Layout, work: Workload, *, full: bool, sparse: bool
) -> LayerBytes:
    """Activations of one decoder layer; the selected keys of a full layer are counted apart.

    The attention core keeps absorbed q, out and lse. A document of at most index_topk tokens takes
    less, which is not counted.
    """
    core = s.tokens * s.heads * (BF16 * (c.d_qk + c.d_v) + FP32)
    if layout.tp > 1 and work.keeps_input("kv_b_proj"):
        # back from tokens to heads for the output's weight, the result is another tensor
        core += BF16 * s.tokens * s.heads * c.d_v
    attention = _projections(c, s, work) + BF16 * s.keys * c.d_qk + core
    if sparse:
        mlp, passing = _experts(c, s, layout, work)
    else:
        mlp, passing = _dense_mlp(c, s, layout, work)
    if full and work.trains_indexer:
        attention += _indexer(c, s)
        passing = max(passing, _mass_passing(c, s))
    return LayerBytes(
        kept=attention + _mlp_norm(c, s, work, sparse=sparse) + mlp,
        kept_core=core,
        kept_mlp=mlp,
        passing=max(passing, _attention_passing(c, s)),
        entry=BF16 * s.shard * c.hidden_size,
    )


def selection_bytes(c: Glm5Config, s: Shapes) -> int:
    """topk_indices of one full layer, which the shared layers below it only refer to.

    Tensor-parallel ranks share the queries (attention_parallel "tokens").
    """
    return INT32 * s.shard * c.index_topk


def head_bytes(c: Glm5Config, s: Shapes, layout: Layout, work: Workload) -> int:
    """The last stage's fullest moment: logits in bf16 beside their fp32 softmax.

    With a trained head its bf16 gradient meets the gradient of the logits later.
    """
    vocab = c.vocab_size // layout.tp
    logits = BF16 * s.tokens * vocab
    softmax = FP32 * s.tokens * vocab
    weight_grad = BF16 * vocab * c.hidden_size if work.mode == "full" else 0
    return _norm(s.shard * c.hidden_size, kept=True) + max(logits + softmax, logits + weight_grad)


def buffer_bytes(c: Glm5Config, s: Shapes, layout: Layout) -> int:
    """Buffers of the collectives: gathered tokens of tp, and what pipeline stages exchange."""
    gathered = BF16 * s.tokens * c.hidden_size if layout.tp > 1 else 0
    exchanged = 4 * BF16 * s.shard * c.hidden_size if layout.pp > 1 else 0
    return gathered + exchanged


def _norm(size: int, *, kept: bool) -> int:
    """RMSNorm keeps its input, and what follows may keep its result."""
    return BF16 * size * (1 + int(kept))


def _projections(c: Glm5Config, s: Shapes, work: Workload) -> int:
    """From the layer's input to absorbed queries and keys, and the output projection's input."""
    input_kept = work.keeps_input("q_a_proj", "kv_a_proj_with_mqa")
    norms = _norm(s.shard * c.hidden_size, kept=input_kept)
    norms += _norm(s.shard * c.q_lora_rank, kept=work.keeps_input("q_b_proj"))
    norms += _norm(s.shard * c.kv_lora_rank, kept=False)
    queries = c.qk_head_dim if work.keeps_input("kv_b_proj") else 0
    values = c.v_head_dim if work.keeps_input("o_proj") else 0
    return norms + BF16 * s.tokens * s.heads * (queries + values)


def _attention_passing(c: Glm5Config, s: Shapes) -> int:
    """In the backward pass: gradients of out (and its contiguous copy) and of q."""
    return BF16 * s.tokens * s.heads * (2 * c.d_v + c.d_qk + c.qk_head_dim)


def _indexer(c: Glm5Config, s: Shapes) -> int:
    """Its queries, its input in fp32 for the head weights, the loss's gradient in its scores."""
    queries = BF16 * s.shard * c.index_n_heads * c.index_head_dim
    return queries + FP32 * s.shard * (c.hidden_size + c.index_topk)


def _mass_passing(c: Glm5Config, s: Shapes) -> int:
    """In the forward pass: the probabilities of a chunk of queries, and their sums over heads."""
    probs = BF16 * s.tokens * s.heads * c.index_topk
    return min(probs, PROB_BYTES) + FP32 * s.shard * c.index_topk


def _mlp_norm(c: Glm5Config, s: Shapes, work: Workload, *, sparse: bool) -> int:
    # the router keeps its input whether or not it trains
    kept = sparse or work.keeps_input("gate_proj", "up_proj")
    return _norm(s.shard * c.hidden_size, kept=kept)


def _gated(rows: int, width: int, *, input_kept: bool) -> int:
    """fc1's result; silu of one half, and a copy of the other; fc2's input."""
    return BF16 * rows * width * (4 + int(input_kept))


def _dense_mlp(c: Glm5Config, s: Shapes, layout: Layout, work: Workload) -> tuple[int, int]:
    width = c.intermediate_size // layout.tp
    kept = _gated(s.tokens, width, input_kept=work.keeps_input("down_proj"))
    return kept, BF16 * s.tokens * (3 * width + c.hidden_size)


def _experts(c: Glm5Config, s: Shapes, layout: Layout, work: Workload) -> tuple[int, int]:
    """(kept, passing) of router, routed and shared experts.

    Rows of routed tokens exist up to four times at once: permuted, sorted by expert, the experts'
    results, and those in the order of the tokens; once more where they travel between ranks. The
    sorted ones are kept where the experts train.
    """
    shared_width = c.moe_intermediate_size * c.n_shared_experts // layout.tp
    kept = _router(c, s)
    kept += _gated(s.tokens, shared_width, input_kept=work.keeps_input("down_proj"))
    # one fused operation, which keeps fc1's result alone
    halves = 2 + int(work.keeps_input_of_experts("down_proj"))
    kept += BF16 * s.routed * halves * (c.moe_intermediate_size // layout.etp)
    copies = 5 if s.alltoall else 4
    copy = BF16 * s.routed * c.hidden_size
    if work.keeps_input_of_experts("gate_proj", "up_proj"):
        kept += copy
        copies -= 1
    return kept, copies * copy


def _router(c: Glm5Config, s: Shapes) -> int:
    """Scores and probabilities in fp32, the map of the routed tokens and its order."""
    return s.shard * c.n_routed_experts * (3 * FP32 + INT64 + 2)
