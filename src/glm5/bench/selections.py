"""Key selections to time attention on."""

import torch
from torch import Tensor


def random_causal(t_q: int, t_k: int, topk: int) -> Tensor:
    """The last t_q of t_k positions each choose topk of their past keys uniformly: ascending.

    -> [t_q, topk] int32 on the GPU, -1 at the tail.
    """
    blocks = []
    for rows in torch.arange(t_k - t_q, t_k, device="cuda").split(1024):
        keys = torch.arange(t_k, device="cuda")
        scores = torch.rand(len(rows), t_k, device="cuda")
        scores = scores.masked_fill_(keys > rows[:, None], 2.0)
        chosen = scores.topk(min(topk, t_k), dim=1, largest=False)
        indices = chosen.indices.masked_fill(chosen.values > 1.0, t_k).sort(1).values
        blocks.append(indices.masked_fill(indices == t_k, -1).int())
    indices = torch.cat(blocks)
    return torch.nn.functional.pad(indices, (0, topk - indices.shape[1]), value=-1)


def drifting(t_q: int, t_k: int, topk: int, replaced: float = 0.03) -> Tensor:
    """Each row keeps the previous row's keys but for a small share: ascending, no tail.

    All t_k keys may be chosen by every row. -> [t_q, topk] int32 on the GPU.
    """
    generator = torch.Generator().manual_seed(1)
    chosen = torch.randperm(t_k, generator=generator)[:topk]
    is_chosen = torch.zeros(t_k, dtype=torch.bool)
    is_chosen[chosen] = True
    num_replaced, rows = int(topk * replaced), []
    for _ in range(t_q):
        old = torch.randperm(topk, generator=generator)[:num_replaced]
        new = torch.randint(0, t_k, (4 * num_replaced,), generator=generator).unique()
        new = new[~is_chosen[new]]
        new = new[torch.randperm(len(new), generator=generator)][:num_replaced]
        old = old[: len(new)]
        is_chosen[chosen[old]] = False
        is_chosen[new] = True
        chosen[old] = new
        rows.append(is_chosen.nonzero().flatten())
    return torch.stack(rows).int().cuda()
