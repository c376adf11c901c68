"""Dense causal attention of packed documents, through PyTorch's own kernels."""

from collections.abc import Sequence
from itertools import accumulate, groupby

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

# Up to this many tokens one call over many documents beats one call for each of them.
_SHORT = 768
# cuDNN plans anew, for 0.1 s, for every length that it has not seen: lengths are rounded up.
_LENGTH_STEP = 128
_KERNELS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], softmax_scale: float
) -> Tensor:
    """softmax(softmax_scale q . k) v inside each document, whose token i sees its tokens 0 .. i.

    q, k [t, h, d_qk], v [t, h, d_v] of one float dtype on any device; lengths of the documents,
    end to end, at least 1 each and t in all; known to the host, so that nothing waits for the GPU
    -> out [t, h, d_v]. Differentiable; on a GPU the backward's additions, hence the last bits of
    its results, change from run to run.
    """
    assert sum(lengths) == len(q) and all(lengths), f"{lengths} are not the documents of {len(q)}"
    parts = _split(lengths, _SHORT if _has_varlen_kernel(q, v) else 0)
    sizes = [sum(part) for _, part in parts]
    outs = [
        _many(q_part, k_part, v_part, part, softmax_scale)
        if many
        else _one(q_part, k_part, v_part, softmax_scale)
        for (many, part), q_part, k_part, v_part in zip(
            parts, q.split(sizes), k.split(sizes), v.split(sizes), strict=True
        )
    ]
    return outs[0] if len(outs) == 1 else torch.cat([v[:0], *outs])


def _split(lengths: Sequence[int], short: int) -> list[tuple[bool, list[int]]]:
    """(True, a run of documents of at most `short` tokens) or (False, one longer document)."""
    parts: list[tuple[bool, list[int]]] = []
    for is_short, group in groupby(lengths, lambda length: length <= short):
        run = list(group)
        parts += [(True, run)] if is_short else [(False, [length]) for length in run]
    return parts


def _has_varlen_kernel(q: Tensor, v: Tensor) -> bool:
    d = q.shape[2]
    return (
        q.is_cuda
        and q.dtype in (torch.bfloat16, torch.float16)
        and v.shape[2] == d
        and d <= 256
        and d % 8 == 0
    )


def _many(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], softmax_scale: float) -> Tensor:
    edges = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).pin_memory()
    edges, longest = edges.to(q.device, non_blocking=True), max(lengths)
    causal = (-1, 0)
    out = varlen_attn(
        q, k, v, edges, edges, longest, longest, scale=softmax_scale, window_size=causal
    )
    assert isinstance(out, Tensor), "the log-sum-exp was not asked for"
    return out


def _one(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float) -> Tensor:
    """One document. Zeros behind its end change nothing: no token of the document sees them."""
    length = len(q)
    padding = -length % _LENGTH_STEP if q.is_cuda else 0
    if padding:
        q, k, v = (F.pad(x, (0, 0, 0, 0, 0, padding)) for x in (q, k, v))
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    with sdpa_kernel(_KERNELS, set_priority=True):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=softmax_scale)
    return out.squeeze(0).transpose(0, 1)[:length]
