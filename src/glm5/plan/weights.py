"""How many weights a rank holds, by kind of layer, and how many of them train."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from glm5.config import Glm5Config
from glm5.plan.workload import Workload
from glm5.runtime.distributed import Layout

BF16_BYTES = 2
# A float8 value, and its part of the fp32 scale of a block of 128 x 128.
FP8_BYTES = 1 + 4 / 128**2

# How the ranks share a weight: its outputs, its inputs, or not at all.
Split = Literal["column", "row", "whole"]


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight [rows, columns]; a vector has one column. Of experts there are `experts`."""

    name: str
    rows: int
    columns: int
    split: Split
    experts: int = 0
    """Routed experts are shared out over ep and cut over etp; all else is cut over tp."""
    together: int = 1
    """Weights of this size that are one tensor in Megatron: gate above up, and all experts."""
    quantisable: bool = False
    """Whether an FP8 release has it in float8."""

    def count(self, layout: Layout) -> int:
        """Of such weights on one rank."""
        return self.experts // layout.ep if self.experts else 1

    def cut(self, layout: Layout) -> int:
        """Ranks that share one such weight."""
        if self.split == "whole":
            return 1
        return layout.etp if self.experts else layout.tp

    def elements(self, layout: Layout) -> int:
        """Of this rank."""
        return self.rows * self.columns * self.count(layout) // self.cut(layout)

    def adapter_elements(self, layout: Layout, work: Workload) -> tuple[int, int]:
        """This rank's A [rank, columns] and B [rows, rank], of which one is cut as the weight is:
        (in all, those of each expert's own)."""
        if self.experts and work.expert_lora == "none":
            return 0, 0
        columns = self.columns // (self.cut(layout) if self.split == "row" else 1)
        rows = self.rows // (self.cut(layout) if self.split == "column" else 1)
        count, rank = self.count(layout), work.adapter_rank
        if not self.experts:
            return rank * (rows + columns), 0
        if work.expert_lora == "per_expert":
            return rank * (rows + columns) * count, rank * (rows + columns) * count
        # all experts share the factor that is not cut
        own, shared = (rows, columns) if self.split == "column" else (columns, rows)
        return rank * (own * count + shared), rank * own * count


@dataclass(frozen=True)
class Elements:
    """Weights of one rank: in all, and those that train (adapters included in both)."""

    total: int
    trained: int
    experts: int
    """Of those that train, the routed experts' own."""
    largest: int
    """In full training, the largest single tensor."""
    float8: int = 0
    """Of all, those that are held in float8."""

    @property
    def num_bytes(self) -> int:
        """Of all weights, scales included."""
        return BF16_BYTES * (self.total - self.float8) + round(FP8_BYTES * self.float8)

    def __add__(self, other: Elements) -> Elements:
        return Elements(
            self.total + other.total,
            self.trained + other.trained,
            self.experts + other.experts,
            max(self.largest, other.largest),
            self.float8 + other.float8,
        )

    def times(self, count: int) -> Elements:
        """Of so many equal layers."""
        return Elements(
            self.total * count,
            self.trained * count,
            self.experts * count,
            self.largest,
            self.float8 * count,
        )


NOTHING = Elements(0, 0, 0, 0)


def elements(weights: Iterable[Weight], layout: Layout, work: Workload) -> Elements:
    """What these weights come to on one rank."""
    found = NOTHING
    for weight in weights:
        own, trained, of_experts, largest = weight.elements(layout), 0, 0, 0
        if work.mode == "full":
            trained, largest = own, own * weight.together
            of_experts = own if weight.experts else 0
        elif weight.name in work.targets:
            trained, of_experts = weight.adapter_elements(layout, work)
        total = own if work.mode == "full" else own + trained
        float8 = own if weight.quantisable and work.base_weights == "fp8" else 0
        found += Elements(total, trained, of_experts, largest, float8)
    return found


def embedding_weights(c: Glm5Config) -> list[Weight]:
    """Of the first stage."""
    return [Weight("embed_tokens", c.vocab_size, c.hidden_size, "column")]


def head_weights(c: Glm5Config) -> list[Weight]:
    """Of the last stage."""
    return [_norm("norm", c.hidden_size), Weight("lm_head", c.vocab_size, c.hidden_size, "column")]


def layer_weights(c: Glm5Config, *, full: bool, sparse: bool) -> list[Weight]:
    """Of one decoder layer, of either kind of indexer and MLP."""
    norms = [_norm("input_layernorm", c.hidden_size), _norm("post_layernorm", c.hidden_size)]
    mlp = _sparse_mlp(c) if sparse else _gated_mlp(c.hidden_size, c.intermediate_size)
    return [*norms, *_attention(c), *(_indexer(c) if full else []), *mlp]


def _attention(c: Glm5Config) -> Iterator[Weight]:
    heads = c.num_attention_heads
    yield _linear("q_a_proj", c.q_lora_rank, c.hidden_size, "whole")
    yield _norm("q_a_layernorm", c.q_lora_rank)
    yield _linear("q_b_proj", heads * c.qk_head_dim, c.q_lora_rank, "column")
    yield _linear("kv_a_proj_with_mqa", c.d_qk, c.hidden_size, "whole")
    yield _norm("kv_a_layernorm", c.kv_lora_rank)
    kv_rows = heads * (c.qk_nope_head_dim + c.v_head_dim)
    yield _linear("kv_b_proj", kv_rows, c.kv_lora_rank, "column")
    yield _linear("o_proj", c.hidden_size, heads * c.v_head_dim, "row")


def _indexer(c: Glm5Config) -> Iterator[Weight]:
    yield _linear("wq_b", c.index_n_heads * c.index_head_dim, c.q_lora_rank, "whole")
    yield _linear("wk", c.index_head_dim, c.hidden_size, "whole")
    yield _norm("k_norm", 2 * c.index_head_dim)
    yield Weight("weights_proj", c.index_n_heads, c.hidden_size, "whole")


def _sparse_mlp(c: Glm5Config) -> Iterator[Weight]:
    yield Weight("gate", c.n_routed_experts, c.hidden_size, "whole")
    for weight in _gated_mlp(c.hidden_size, c.moe_intermediate_size):
        yield replace(weight, experts=c.n_routed_experts)
    yield from _gated_mlp(c.hidden_size, c.moe_intermediate_size * c.n_shared_experts)


def _gated_mlp(hidden: int, width: int) -> Iterator[Weight]:
    yield _linear("gate_proj", width, hidden, "column", together=2)
    yield _linear("up_proj", width, hidden, "column", together=2)
    yield _linear("down_proj", hidden, width, "row")


def _linear(name: str, rows: int, columns: int, split: Split, *, together: int = 1) -> Weight:
    """One that the FP8 releases quantise."""
    return Weight(name, rows, columns, split, together=together, quantisable=True)


def _norm(name: str, size: int) -> Weight:
    return Weight(name, size, 1, "whole")
