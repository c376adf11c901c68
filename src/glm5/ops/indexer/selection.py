"""The tie rule of top-k selection, in one place."""

import torch
from torch import Tensor

from glm5.ops.key_sets import Chunk, KeyBounds


@torch.no_grad()
def select_from_scores(scores: Tensor, starts: Tensor, ends: Tensor, topk: int) -> Tensor:
    """Positions of the topk highest scores of each row among the keys [starts, ends).

    scores [t_q, t_k] float, starts, ends [t_q] int32 -> topk_indices [t_q, topk] int32, ascending
    key position, -1 only at the tail. Equal scores are broken by the lower key position, and
    -0.0 equals 0.0. NaN ranks above every number, so a NaN score is selected rather than hidden.
    A row with fewer than topk valid keys selects them all; an empty row is all -1.
    """
    t_q, t_k = scores.shape
    valid = KeyBounds(starts, ends).mask(Chunk(slice(0, t_q), slice(0, t_k)))
    return pack_selection(choose(scores, valid, topk), topk)


def choose(scores: Tensor, valid: Tensor, topk: int) -> Tensor:
    """Mark the topk best valid keys of each row.

    scores [t_q, t_k] float, valid [t_q, t_k] bool -> [t_q, t_k] bool.
    """
    num_kept = min(topk, scores.shape[1])
    if num_kept == 0 or scores.shape[0] == 0:
        return torch.zeros_like(valid)
    keys = _order_keys(scores)
    keys.masked_fill_(~valid, torch.iinfo(keys.dtype).min)
    threshold = keys.topk(num_kept, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    above = keys > threshold
    tied = (keys == threshold) & valid
    room = num_kept - above.sum(-1, keepdim=True)
    return above | (tied & (tied.cumsum(-1, dtype=torch.int32) <= room))


def pack_selection(chosen: Tensor, topk: int) -> Tensor:
    """List the marked keys: [t_q, t_k] bool, at most topk a row -> [t_q, topk] int32, -1 tail."""
    t_q, t_k = chosen.shape
    slots = chosen.cumsum(-1).sub_(1).masked_fill_(~chosen, topk)
    positions = torch.arange(t_k, dtype=torch.int32, device=chosen.device).expand(t_q, t_k)
    # Keys that are not chosen all land in one spare column, which is cut off.
    packed = torch.full((t_q, topk + 1), -1, dtype=torch.int32, device=chosen.device)
    return packed.scatter_(1, slots, positions)[:, :topk].contiguous()


def _order_keys(scores: Tensor) -> Tensor:
    """Integers in the order of the scores: exact ties stay exact, and NaN gets the highest."""
    if scores.dtype not in (torch.float32, torch.float64):
        scores = scores.float()
    int_dtype = torch.int32 if scores.dtype == torch.float32 else torch.int64
    largest = torch.iinfo(int_dtype).max
    # Adding 0.0 turns -0.0 into 0.0, whose bits differ.
    bits = (scores + 0.0).view(int_dtype)
    # Negative floats are sign and magnitude: flipping the magnitude makes their bits ascend.
    keys = torch.where(bits < 0, bits ^ largest, bits)
    return keys.masked_fill_(scores.isnan(), largest)
