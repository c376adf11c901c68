"""Index scores on Hopper: wgmma on tiles that arrive by TMA, evenly spread over the processors.

One persistent program per multiprocessor. A warp loads key tiles; two warpgroups share them, each
with 8 * 32 query rows of its own, so that a key is read from L2 once for 16 queries. A warpgroup
sums the heads of one half of its columns while the tensor cores work on the other half.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from glm5.ops.devices import is_hopper

_BLOCK_K = 64
_HEAD_DIM = 128
# Query rows times heads of one program: two warpgroups of two halves of 128 columns.
_COLUMNS = 512
_STAGES = 5
# The most query rows of one launch; a constant, so that no length needs another kernel.
MAX_ROWS = 8192


@triton.jit(do_not_specialize=["num_rows", "num_keys", "rows_per_chunk", "topk", "num_blocks"])
def _plan_tiles_kernel(
    starts_ptr, ends_ptr, first_key_ptr, first_tile_ptr,
    num_rows, num_keys, rows_per_chunk, topk, num_blocks, stride,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, MAX_BLOCKS: tl.constexpr,
):  # fmt: skip
    """For each block of rows of one chunk: its first key, and the number of tiles before it."""
    chunk = tl.program_id(0)
    blocks = tl.arange(0, MAX_BLOCKS)
    low = tl.full([MAX_BLOCKS], 2**31 - 1, tl.int32)
    high = tl.full([MAX_BLOCKS], 0, tl.int32)
    for i in tl.range(0, BLOCK_Q):
        local = blocks * BLOCK_Q + i
        row = chunk * rows_per_chunk + local
        inside = (local < rows_per_chunk) & (row < num_rows)
        start = tl.maximum(tl.load(starts_ptr + row, mask=inside, other=0), 0)
        end = tl.minimum(tl.load(ends_ptr + row, mask=inside, other=0), num_keys)
        # A row with at most topk valid keys selects them all, whatever their scores.
        scored = end - start > topk
        low = tl.minimum(low, tl.where(scored, start, low))
        high = tl.maximum(high, tl.where(scored, end, high))
    first_key = low // BLOCK_K * BLOCK_K
    num_tiles = tl.where(high > 0, tl.cdiv(high - first_key, BLOCK_K), 0)
    out = chunk * stride + blocks
    tl.store(first_key_ptr + out, first_key, mask=blocks < num_blocks)
    tl.store(first_tile_ptr + out + 1, tl.cumsum(num_tiles, 0), mask=blocks < num_blocks)
    tl.store(first_tile_ptr + chunk * stride, 0)


@gluon.jit
def _block_tiles(first_key_ptr, first_tile_ptr, block, tile, end):
    """First key of the next tile, and how many tiles this program has left in the block."""
    first_tile = gl.load(first_tile_ptr + block)
    key = gl.load(first_key_ptr + block) + (tile - first_tile) * 64
    return key, gl.minimum(gl.load(first_tile_ptr + block + 1), end) - tile


@gluon.jit
def _load_tiles(
    q_desc, k_desc, q_smem, k_smem, q_full, q_empty, k_full, k_empty,
    first_key_ptr, first_tile_ptr, first_row, block, tile, end,
    NUM_HEADS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Producer: the queries of each block, then its key tiles through a ring of stages."""
    num_blocks_done, num_tiles_done = 0, 0
    while tile < end:
        key, num_tiles = _block_tiles(first_key_ptr, first_tile_ptr, block, tile, end)
        if num_tiles > 0:
            column = first_row * NUM_HEADS + block * 512
            for i in gl.static_range(4):
                if i % 2 == 0:
                    mbarrier.wait(q_empty.index(i // 2), (num_blocks_done & 1) ^ 1)
                    mbarrier.expect(q_full.index(i // 2), 2 * q_desc.block_type.nbytes)
                tma.async_copy_global_to_shared(
                    q_desc, [column + i * 128, 0], q_full.index(i // 2), q_smem.index(i)
                )
            for i in range(num_tiles):
                stage = num_tiles_done % STAGES
                mbarrier.wait(k_empty.index(stage), (num_tiles_done // STAGES & 1) ^ 1)
                mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes)
                tma.async_copy_global_to_shared(
                    k_desc, [key + i * 64, 0], k_full.index(stage), k_smem.index(stage)
                )
                num_tiles_done += 1
            num_blocks_done += 1
            tile += num_tiles
        block += 1


@gluon.jit
def _store_head_sums(similarity, weights, scores_ptr, key, scores_stride, NUM_HEADS: gl.constexpr):
    """Scores of 64 keys for the queries whose heads are the columns."""
    num_queries: gl.constexpr = similarity.shape[1] // NUM_HEADS
    # A NaN has to reach the selection, which ranks it highest.
    similarity = gl.maximum(similarity, 0.0, propagate_nan=tl.PropagateNan.ALL)
    scores = gl.sum((similarity * weights[None, :]).reshape([64, num_queries, NUM_HEADS]), axis=2)
    layout: gl.constexpr = scores.type.layout
    keys = key + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    rows = gl.arange(0, num_queries, layout=gl.SliceLayout(0, layout)).to(gl.int64)
    gl.store(scores_ptr + rows[None, :] * scores_stride + keys[:, None], scores)


@gluon.jit
def _load_weights(weights_ptr, row, num_rows, NUM_HEADS: gl.constexpr, layout: gl.constexpr):
    columns = gl.arange(0, 128, layout=gl.SliceLayout(0, layout))
    inside = row + columns // NUM_HEADS < num_rows
    return gl.load(weights_ptr + row * NUM_HEADS + columns, mask=inside, other=0.0)


@gluon.jit
def _score_tiles(
    which, q_smem, k_smem, q_full, q_empty, k_full, k_empty,
    weights_ptr, scores_ptr, first_key_ptr, first_tile_ptr, first_row, num_rows, scores_stride,
    block, tile, end, NUM_HEADS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Consumer: one of the two warpgroups."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    half: gl.constexpr = 128 // NUM_HEADS
    acc_a = gl.zeros([64, 128], gl.float32, layout)
    acc_b = gl.zeros([64, 128], gl.float32, layout)
    q_a = q_smem.index(2 * which).permute([1, 0])
    q_b = q_smem.index(2 * which + 1).permute([1, 0])
    num_blocks_done, num_tiles_done = 0, 0
    while tile < end:
        key, num_tiles = _block_tiles(first_key_ptr, first_tile_ptr, block, tile, end)
        if num_tiles > 0:
            local = block * (4 * half) + which * (2 * half)
            weights_a = _load_weights(weights_ptr, first_row + local, num_rows, NUM_HEADS, layout)
            weights_b = _load_weights(
                weights_ptr, first_row + local + half, num_rows, NUM_HEADS, layout
            )
            out_a = scores_ptr + local.to(gl.int64) * scores_stride
            out_b = out_a + half * scores_stride
            mbarrier.wait(q_full.index(which), num_blocks_done & 1)
            for _i in range(num_tiles):
                stage = num_tiles_done % STAGES
                mbarrier.wait(k_full.index(stage), num_tiles_done // STAGES & 1)
                k = k_smem.index(stage)
                a = warpgroup_mma(k, q_a, acc_a, use_acc=False, is_async=True)
                b = warpgroup_mma(k, q_b, acc_b, use_acc=False, is_async=True)
                acc_a = warpgroup_mma_wait(1, deps=[a])
                _store_head_sums(acc_a, weights_a, out_a, key, scores_stride, NUM_HEADS)
                acc_b = warpgroup_mma_wait(0, deps=[b])
                mbarrier.arrive(k_empty.index(stage), count=1)
                _store_head_sums(acc_b, weights_b, out_b, key, scores_stride, NUM_HEADS)
                num_tiles_done += 1
                key += 64
            mbarrier.arrive(q_empty.index(which), count=1)
            num_blocks_done += 1
            tile += num_tiles
        block += 1


@gluon.jit(do_not_specialize=["num_rows", "first_row", "num_blocks"])
def _index_scores_hopper_kernel(
    q_desc, k_desc, weights_ptr, scores_ptr, first_key_ptr, first_tile_ptr,
    num_rows, first_row, num_blocks, scores_stride,
    NUM_HEADS: gl.constexpr, STAGES: gl.constexpr, MAX_BLOCKS: gl.constexpr,
):  # fmt: skip
    # Every program takes an equal share of the tiles of all blocks.
    total = gl.load(first_tile_ptr + num_blocks).to(gl.int64)
    tile = (total * gl.program_id(0) // gl.num_programs(0)).to(gl.int32)
    end = (total * (gl.program_id(0) + 1) // gl.num_programs(0)).to(gl.int32)
    blocks = gl.arange(0, MAX_BLOCKS, layout=gl.BlockedLayout([1], [32], [4], [0]))
    first_tiles = gl.load(first_tile_ptr + blocks + 1, mask=blocks < num_blocks, other=2**31 - 1)
    block = gl.sum((first_tiles <= tile).to(gl.int32), axis=0)
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [4, 128, 128], q_desc.layout)
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 64, 128], k_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
    gl.warp_specialize(
        [
            (_score_tiles, (
                0, q_smem, k_smem, q_full, q_empty, k_full, k_empty,
                weights_ptr, scores_ptr, first_key_ptr, first_tile_ptr, first_row, num_rows,
                scores_stride, block, tile, end, NUM_HEADS, STAGES,
            )),
            (_score_tiles, (
                1, q_smem, k_smem, q_full, q_empty, k_full, k_empty,
                weights_ptr, scores_ptr, first_key_ptr, first_tile_ptr, first_row, num_rows,
                scores_stride, block, tile, end, NUM_HEADS, STAGES,
            )),
            (_load_tiles, (
                q_desc, k_desc, q_smem, k_smem, q_full, q_empty, k_full, k_empty,
                first_key_ptr, first_tile_ptr, first_row, block, tile, end, NUM_HEADS, STAGES,
            )),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip


def fits_hopper(q: Tensor) -> bool:
    """Whether the Hopper kernel computes the scores of these queries."""
    return (
        is_hopper(q)
        and q.dtype == torch.bfloat16
        and q.shape[2] == _HEAD_DIM
        and q.shape[1] in (4, 8, 16, 32, 64)
    )


def hopper_scorer(
    q: Tensor, k: Tensor, weights: Tensor, starts: Tensor, ends: Tensor, topk: int, num_rows: int
) -> Callable[[int, Tensor], None]:
    """As portable_scorer, for queries that fits_hopper.

    num_rows is a multiple of 128, and the score rows have a multiple of 64 columns.
    """
    block_q = _COLUMNS // q.shape[1]
    first_key, first_tile = _plan_tiles(starts, ends, len(k), topk, num_rows, block_q)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    q_desc = TensorDescriptor.from_tensor(q.flatten(0, 1), [_COLUMNS // 4, _HEAD_DIM], layout)
    k_desc = TensorDescriptor.from_tensor(k, [_BLOCK_K, _HEAD_DIM], layout)
    num_blocks = num_rows // block_q
    num_processors = torch.cuda.get_device_properties(q.device).multi_processor_count

    def score_chunk(chunk: int, scores: Tensor) -> None:
        _index_scores_hopper_kernel[(num_processors,)](
            q_desc, k_desc, weights, scores, first_key[chunk], first_tile[chunk],
            len(q), chunk * num_rows, num_blocks, scores.stride(0),
            NUM_HEADS=q.shape[1], STAGES=_STAGES,
            MAX_BLOCKS=MAX_ROWS // block_q, num_warps=4,
        )  # fmt: skip

    return score_chunk


def _plan_tiles(
    starts: Tensor, ends: Tensor, num_keys: int, topk: int, num_rows: int, block_q: int
) -> tuple[Tensor, Tensor]:
    """First key of each block of rows, and the number of tiles in the blocks before it.

    Both [chunks, padded blocks] int32. Made on the device: no host sync.
    """
    num_chunks, num_blocks = triton.cdiv(len(starts), num_rows), num_rows // block_q
    # One entry more than blocks, and rows of whole 16 bytes.
    first_key, first_tile = starts.new_empty(2, num_chunks, num_blocks // 4 * 4 + 4)
    _plan_tiles_kernel[(num_chunks,)](
        starts, ends, first_key, first_tile,
        len(starts), num_keys, num_rows, topk, num_blocks, first_key.stride(0),
        BLOCK_Q=block_q, BLOCK_K=_BLOCK_K, MAX_BLOCKS=MAX_ROWS // block_q,
    )  # fmt: skip
    return first_key, first_tile
