"""Whether a written adapter is the one that it was written from, factor by factor."""

import torch
from torch import Tensor

from glm5.checkpoint.adapter import LoraAdapter, LoraFactors
from glm5.checkpoint.names import summarise
from glm5.errors import CheckFailedError


def compare_adapters(written: LoraAdapter, source: LoraAdapter) -> tuple[float, float]:
    """(largest error, its limit) of scale * b, relative to each linear's largest element.

    `a` must be equal bit by bit up to zeros behind the rank, so that equal scale * b mean equal
    deltas. The limit is one rounding of b; without one the error is that of alpha / rank in fp64.
    What only one side has must be all zero; whole modules must be equal.

    Raises CheckFailedError, naming the linear or module.
    """
    worst = limit = 0.0
    for path, pair in source.factors.items():
        limit = (1 + 1e-6) * torch.finfo(pair.b.dtype).eps / 2
        if path in written.factors:
            error = _error(path, written.factors[path], pair)
            if not error <= limit:
                _fail(path, f"scale * b off by {error:.3g}", f"at most {limit:.3g}")
            worst = max(worst, error)
        elif pair.b.any():
            _fail(path, "nothing", "an adapter")
    added = [path for path in written.factors if path not in source.factors]
    if any(written.factors[path].b.any() for path in added):
        _fail(summarise(added), "an adapter", "nothing")
    if written.modules.keys() != source.modules.keys():
        _fail("modules", sorted(written.modules), sorted(source.modules))
    for name, tensor in source.modules.items():
        if not _equal(written.modules[name], tensor):
            _fail(name, "other values", "those of the source")
    return worst, limit


def _error(path: str, written: LoraFactors, source: LoraFactors) -> float:
    rank = source.a.shape[0]
    a, b = written.a, written.b
    if not _equal(a[:rank], source.a) or a[rank:].any() or b[:, rank:].any():
        _fail(path, "another lora_A", "that of the source, and zeros behind its rank")
    if written.scale == source.scale and _equal(b[:, :rank], source.b):
        return 0.0
    expected = source.scale * source.b.double().cpu()
    error = (written.scale * b[:, :rank].double() - expected).abs().max()
    return float(error / expected.abs().max().clamp_min(torch.finfo(torch.float64).tiny))


def _equal(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left.cpu(), right.detach().cpu())


def _fail(what: str, got: object, expected: object) -> None:
    raise CheckFailedError(
        f"the written adapter is another one: {what}",
        got=got,
        expected=expected,
        remedy="nothing was written; report this with the adapter's adapter_config.json",
    )
