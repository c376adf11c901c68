"""Linears whose weight stays in float8 with its block scales, and never trains."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import gcd
from typing import Any, Self

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from glm5.errors import ConfigError
from glm5.model.experts import CUT_DIM, GroupedLinear, Offsets
from glm5.model.linear import AbsorbedProjection, split_heads
from glm5.model.transformer_config import Glm5TransformerConfig, build_device
from glm5.ops.absorbed import HeadPair, from_latent, to_latent
from glm5.ops.block_scaled import BLOCK, FP8_DTYPE, BlockScaled, scale_grid
from glm5.ops.frozen_linear import frozen_linear
from glm5.ops.grouped import GroupedPair, grouped_linear

Block = tuple[int, int]


class BlockScaledWeight(nn.Module):
    """Holds `weight` [.., out, in] float8_e4m3fn and `weight_scale_inv`, one fp32 scale a block.

    A training checkpoint holds nothing of it: it is read from the folder of the base.
    """

    weight: nn.Parameter
    weight_scale_inv: Tensor
    block: Block
    fp8_compute: bool
    """Whether products are in float8; the config's, and see `products_in_float8`."""

    @property
    def block_scaled(self) -> BlockScaled:
        """The weight with its scales."""
        return BlockScaled(self.weight.detach(), self.weight_scale_inv, self.block)

    def product(
        self, x: Tensor, pairs: Sequence[GroupedPair | None] = (), pair_input: Tensor | None = None
    ) -> Tensor:
        """With this rank's part of a weight [out, in]; see frozen_linear."""
        weight = self.block_scaled
        return frozen_linear(x, weight, pairs, pair_input, fp8_compute=self.fp8_compute)

    def hold(self, shape: tuple[int, ...], block: Block, config: Glm5TransformerConfig) -> None:
        """Makes both, in float8 from the start, without values."""
        device = build_device(config)
        values = torch.empty(shape, dtype=FP8_DTYPE, device=device)
        self.weight = nn.Parameter(values, requires_grad=False)
        grid = (*shape[:-2], *scale_grid((shape[-2], shape[-1]), block))
        scales = torch.empty(grid, dtype=torch.float32, device=device)
        self.register_buffer("weight_scale_inv", scales)
        self.block = block
        self.fp8_compute = config.fp8_compute

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: Offsets = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Nothing, in Megatron's calling convention."""
        del prefix, sharded_offsets, metadata
        return {}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # .to(dtype) of a whole model would leave values that mean nothing without their scales
        if fn(self.weight.new_empty(0)).dtype != FP8_DTYPE:
            raise ConfigError(
                "a frozen float8 weight cannot be cast",
                got=f"{type(self).__name__} asked for another dtype",
                expected=f"{FP8_DTYPE}, which means something with its scales alone",
                remedy="build the model in the dtype that it shall compute in",
            )
        return super()._apply(fn, recurse)


class FrozenReplicatedLinear(BlockScaledWeight):
    """`ReplicatedLinear` with a frozen weight: x [.., in] -> (y [.., out] in the dtype of x, no
    bias)."""

    def __init__(
        self, in_features: int, out_features: int, *, config: Glm5TransformerConfig
    ) -> None:
        super().__init__()
        self.config = config
        self.hold((out_features, in_features), base_block(config), config)

    def forward(
        self, x: Tensor, pairs: Sequence[GroupedPair | None] = (), pair_input: Tensor | None = None
    ) -> tuple[Tensor, None]:
        return self.product(x, pairs, pair_input), None


class FrozenParallelLinear(BlockScaledWeight):
    """A linear that tensor-parallel ranks share, by outputs (cut 0) or inputs (1)."""

    def __init__(
        self,
        shape: tuple[int, int],
        cut: int,
        *,
        config: Glm5TransformerConfig,
        parts: int = 1,
        group: ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        if group is None:
            group = parallel_state.get_tensor_model_parallel_group()
        self.group = group
        sizes = list(shape)
        assert sizes[cut] % (parts * self.group.size()) == 0, f"{shape} over {self.group.size()}"
        sizes[cut] //= self.group.size()
        block = own_block(base_block(config), sizes[cut], cut, self.group.size(), parts)
        self.hold((sizes[0], sizes[1]), block, config)
        set_tensor_model_parallel_attributes(self.weight, True, cut, parts)


class FrozenColumnLinear(FrozenParallelLinear):
    """Megatron's ColumnParallelLinear with a frozen weight.

    x [s / tp, b, in] under sequence parallelism, else [s, b, in] -> (y [s, b, out / tp], no bias).
    The gathered x is not kept for the backward, as pairs would: there it takes none.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Glm5TransformerConfig,
        init_method: Any = None,
        gather_output: bool = False,
        bias: bool = False,
        skip_bias_add: bool = False,
        is_expert: bool = False,
        tp_comm_buffer_name: str | None = None,
        tp_group: ProcessGroup | None = None,
        stride: int = 1,
        name: str | None = None,
    ) -> None:
        assert not (bias or gather_output or is_expert), "no linear of this model asks for these"
        del init_method, skip_bias_add, tp_comm_buffer_name, name
        super().__init__((output_size, input_size), 0, config=config, parts=stride, group=tp_group)

    def forward(
        self, x: Tensor, pairs: Sequence[GroupedPair | None] = (), pair_input: Tensor | None = None
    ) -> tuple[Tensor, None]:
        assert not (pairs and self.config.sequence_parallel), "they would keep the gathered x"
        if self.config.sequence_parallel:
            x = gather_from_sequence_parallel_region(x, group=self.group)
        else:
            x = copy_to_tensor_model_parallel_region(x, group=self.group)
        return self.product(x, pairs, pair_input), None


class FrozenRowLinear(FrozenParallelLinear):
    """Megatron's RowParallelLinear with a frozen weight.

    x [s, b, in / tp] -> (y [s / tp, b, out] under sequence parallelism, else [s, b, out], no bias).
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Glm5TransformerConfig,
        input_is_parallel: bool,
        init_method: Any = None,
        bias: bool = False,
        skip_bias_add: bool = False,
        is_expert: bool = False,
        tp_comm_buffer_name: str | None = None,
        tp_group: ProcessGroup | None = None,
        name: str | None = None,
    ) -> None:
        assert input_is_parallel, "no linear of this model has its inputs whole"
        assert not (bias or is_expert), "no linear of this model asks for these"
        del init_method, skip_bias_add, tp_comm_buffer_name, name
        super().__init__((output_size, input_size), 1, config=config, group=tp_group)

    def forward(
        self, x: Tensor, pairs: Sequence[GroupedPair | None] = (), pair_input: Tensor | None = None
    ) -> tuple[Tensor, None]:
        y = self.product(x, pairs, pair_input)
        if self.config.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(y, group=self.group), None
        return reduce_from_tensor_model_parallel_region(y, group=self.group), None


class FrozenLatentUpProjection(FrozenParallelLinear, AbsorbedProjection):
    """`LatentUpProjection` with a frozen weight, dequantised a few heads at a time.

    It multiplies exactly also with `fp8_compute`, as serving engines do.
    """

    def __init__(self, config: Glm5TransformerConfig) -> None:
        glm5 = config.glm5
        self.head_dims = (glm5.qk_nope_head_dim, glm5.v_head_dim)
        shape = (glm5.num_attention_heads * sum(self.head_dims), glm5.kv_lora_rank)
        super().__init__(shape, 0, config=config)

    def absorb_query(self, q: Tensor, pair: HeadPair | None = None) -> Tensor:
        limit = self._transient_bytes
        return to_latent(q, self.block_scaled, self.key_rows, pair, transient_bytes=limit)

    def expand_output(self, out_latent: Tensor, pair: HeadPair | None = None) -> Tensor:
        weight, limit = self.block_scaled, self._transient_bytes
        return from_latent(out_latent, weight, self.value_rows, pair, transient_bytes=limit)

    def expand_latent(self, kv_latent: Tensor) -> tuple[Tensor, Tensor]:
        return split_heads(frozen_linear(kv_latent, self.block_scaled), self.head_dims)

    @property
    def _transient_bytes(self) -> int:
        return self.config.fp8_transient_mib * 2**20


class FrozenGroupedLinear(BlockScaledWeight, GroupedLinear):
    """`GroupedLinear` with frozen weights."""

    def forward(
        self,
        x: Tensor,
        ends: Tensor,
        pairs: Sequence[GroupedPair | None] = (),
        pair_input: Tensor | None = None,
    ) -> Tensor:
        return grouped_linear(
            x, self.block_scaled, ends, pairs, pair_input, fp8_compute=self.fp8_compute
        )

    def make_weight(self, sizes: tuple[int, int, int]) -> None:
        cut = CUT_DIM[self.split]
        ranks = self.groups.expt_tp.size()
        block = own_block(base_block(self.config), sizes[cut], cut - 1, ranks, self.parts)
        self.hold(sizes, block, self.config)


@contextmanager
def products_in_float8(model: nn.Module) -> Iterator[None]:
    """Lets a model of exact products multiply in float8, to see what that changes."""
    frozen = [module for module in model.modules() if isinstance(module, BlockScaledWeight)]
    before = [module.fp8_compute for module in frozen]
    for module in frozen:
        module.fp8_compute = True
    try:
        yield
    finally:
        for module, was in zip(frozen, before, strict=True):
            module.fp8_compute = was


def base_block(config: Glm5TransformerConfig) -> Block:
    """That of the checkpoint where it is in float8, else the published releases'."""
    fp8 = config.glm5.fp8
    return BLOCK if fp8 is None else fp8.weight_block_size


def own_block(block: Block, size: int, cut: int, ranks: int, parts: int) -> Block:
    """The block of a rank's part of a weight, `size` long in dimension `cut`, `parts` linears.

    Where a part or a linear need not begin on a block, blocks are so fine that it does.
    """
    if ranks == 1 and parts == 1:
        return block
    finer = gcd(block[cut], size // parts)
    return (finer, block[1]) if cut == 0 else (block[0], finer)
