"""FLOPs and bytes of one micro-batch on a pipeline stage, and the least time that they take."""

from __future__ import annotations

from dataclasses import dataclass

from glm5.config import Glm5Config
from glm5.plan import activations as act
from glm5.plan import hardware as hw
from glm5.plan import weights as w
from glm5.plan.layouts import Placement
from glm5.plan.memory import Stage, stage_elements
from glm5.plan.workload import Workload
from glm5.runtime.distributed import Layout


@dataclass(frozen=True)
class Seconds:
    """Least time of one micro-batch on a stage, by what it is spent on."""

    products: float
    attention: float
    indexer: float
    memory: float
    """Reading and writing device memory beside the products."""
    exchange: float
    """Collectives of tp, cp and ep, of which nothing is hidden."""

    @property
    def total(self) -> float:
        return self.products + self.attention + self.indexer + self.memory + self.exchange


def stage_seconds(c: Glm5Config, stage: Stage, place: Placement, work: Workload) -> Seconds:
    """Forward, recomputed forward and backward pass of one micro-batch."""
    layout, s = place.layout, act.shapes(c, place.layout, work)
    again = 1 if work.recompute == "full" else 0
    forwards, backwards = 1 + again, 2 if work.mode == "full" else 1
    passes = forwards + backwards
    full_layers = sum(full for full, _ in stage.layers)
    sparse_layers = sum(sparse for _, sparse in stage.layers)
    products = passes * _product_flops(c, stage, s, layout) / hw.MATMUL_FLOPS_PER_S
    return Seconds(
        products=max(products, _weight_seconds(c, stage, layout, work, passes)),
        attention=len(stage.layers) * _sparse_seconds(c, s, work, forwards),
        indexer=full_layers * _indexer_seconds(c, s, work, forwards),
        memory=_activation_bytes(c, stage, s, layout, work, passes) / hw.MEMORY_BYTES_PER_S,
        exchange=passes
        * (
            len(stage.layers) * _token_seconds(c, s, layout)
            + sparse_layers * _routed_seconds(c, s, layout)
        ),
    )


def step_seconds(c: Glm5Config, stages: list[Stage], place: Placement, work: Workload) -> float:
    """Least time of one optimizer step of `place.micro_batches` micro-batches per rank."""
    slowest = max(stage_seconds(c, stage, place, work).total for stage in stages)
    # interleaved stages fill the pipeline in shorter pieces
    idle = (len(stages) - 1) / place.layout.vpp
    return (place.micro_batches + idle) * slowest + max(
        _update_seconds(c, stage, place, work) for stage in stages
    )


def tokens_per_second(
    c: Glm5Config, stages: list[Stage], place: Placement, work: Workload
) -> float:
    """Of all GPUs together, at most."""
    return place.gpus * work.seq_len / step_seconds(c, stages, place, work)


def _product_flops(c: Glm5Config, stage: Stage, s: act.Shapes, layout: Layout) -> float:
    """2 per weight and token that meets it; a token meets num_experts_per_tok routed experts."""
    flops = 0.0
    for (full, sparse), count in stage.kinds.items():
        for weight in w.layer_weights(c, full=full, sparse=sparse):
            if weight.experts:
                one = weight.rows * weight.columns // weight.cut(layout)
                flops += count * 2 * s.routed * one
            else:
                tokens = s.shard if weight.split == "whole" else s.tokens
                flops += count * 2 * tokens * weight.elements(layout)
    if stage.last:
        flops += 2 * s.tokens * c.vocab_size * c.hidden_size / layout.tp
    return flops


def _weight_seconds(
    c: Glm5Config, stage: Stage, layout: Layout, work: Workload, passes: int
) -> float:
    """Every pass reads the weights: with few tokens per expert that is the longer part."""
    held = stage_elements(c, stage, layout, work).num_bytes
    return passes * held / hw.MEMORY_BYTES_PER_S


def _sparse_seconds(c: Glm5Config, s: act.Shapes, work: Workload, forwards: int) -> float:
    """Tensor-parallel ranks share the queries, each with all heads."""
    pairs = s.shard * _mean_keys(work.seq_len, c.index_topk) * c.num_attention_heads
    forward = 2 * (c.d_qk + c.d_v) * pairs / hw.SPARSE_FORWARD_FLOPS_PER_S
    backward = 2 * (3 * c.d_qk + 2 * c.d_v) * pairs / hw.SPARSE_BACKWARD_FLOPS_PER_S
    repeats = 2 if work.recompute != "none" else forwards
    return repeats * forward + backward


def _mean_keys(seq_len: int, topk: int) -> float:
    """Of min(i, topk) over the positions i = 1 .. seq_len of one causal document."""
    if seq_len <= topk:
        return (seq_len + 1) / 2
    return topk - topk * (topk - 1) / 2 / seq_len


def _indexer_seconds(c: Glm5Config, s: act.Shapes, work: Workload, forwards: int) -> float:
    """Of this rank's share of the queries; the gradient of a score costs twice as much."""
    pairs = s.shard * (work.seq_len + 1) / 2
    scores = 2 * c.index_n_heads * c.index_head_dim * pairs / hw.INDEXER_FLOPS_PER_S
    return scores * (forwards + (2 if work.trains_indexer else 0))


def _activation_bytes(
    c: Glm5Config, stage: Stage, s: act.Shapes, layout: Layout, work: Workload, passes: int
) -> float:
    """What a layer keeps or lets pass is written once and read once in every pass."""
    total = 0
    for (full, sparse), count in stage.kinds.items():
        layer = act.layer_bytes(c, s, layout, work, full=full, sparse=sparse)
        total += count * 2 * (layer.kept + layer.passing)
    if stage.last:
        total += 2 * act.head_bytes(c, s, layout, work)
    return total * passes


def _token_seconds(c: Glm5Config, s: act.Shapes, layout: Layout) -> float:
    """tp: tokens gathered before and scattered after attention and MLP, heads exchanged for tokens
    and back around the attention core; keys gathered over tp and cp."""
    tp_bytes = 0.0
    if layout.tp > 1:
        width = 3 * c.hidden_size + c.q_lora_rank + c.d_qk + c.index_head_dim
        width += s.heads * (c.d_qk + c.d_v)
        tp_bytes = act.BF16 * s.tokens * width * (layout.tp - 1) / layout.tp
    cp_bytes = act.BF16 * (s.keys - s.tokens) * (c.d_qk + c.index_head_dim)
    return tp_bytes / hw.NVLINK_BYTES_PER_S + cp_bytes / _link(layout.tp * layout.cp)


def _routed_seconds(c: Glm5Config, s: act.Shapes, layout: Layout) -> float:
    """Routed tokens travel to their experts and back."""
    ranks = layout.ep * layout.etp
    sent = act.BF16 * s.routed * c.hidden_size * (ranks - 1) / ranks
    return 2 * sent / _link(ranks)


def _update_seconds(c: Glm5Config, stage: Stage, place: Placement, work: Workload) -> float:
    """Gradients are reduced and scattered, AdamW runs on each rank's share, weights are gathered.

    AdamW reads the gradient and reads and writes the fp32 weight, two moments and their root.
    """
    held, layout = stage_elements(c, stage, place.layout, work), place.layout
    shares = (
        (held.trained - held.experts, place.copies, layout.tp),
        (held.experts, place.expert_copies, layout.ep * layout.etp),
    )
    seconds = 0.0
    for trained, copies, apart in shares:
        seconds += trained / copies * (4 + 2 * 4 * 4 + 2) / hw.MEMORY_BYTES_PER_S
        exchanged = (4 + act.BF16) * trained * (copies - 1) / copies
        seconds += exchanged / _link(apart * copies)
    return seconds


def _link(ranks: int) -> float:
    """Bytes per second between so many neighbouring ranks."""
    return hw.NVLINK_BYTES_PER_S if ranks <= hw.GPUS_PER_NODE else hw.NETWORK_BYTES_PER_S
