"""How far fp32 results of a layout may be from those of one process, and why.

All differ by rounding alone: ranks add the parts of a sum in another order. What is added, and so
how much rounding there is, depends on the axes. Measured over every case of `LAYOUTS` on CPU + gloo
(torch 2.11.0, 2026-11-30), tensors as a share of their largest value:

| axes | added in another order | gradients | weights after 3 steps |
|---|---|---|---|
| dp, pp | micro-batches, what two stages have in common, the gradient's norm | 2.0e-7 | 1.1e-6 |
| ep, etp | also what experts, or parts of them, give for a token | 2.2e-6 | 3.0e-6 |
| tp, cp | also sums over heads, widths, and the queries of a key | 4.9e-6 | 6.9e-6 |

Gradients of adapters over pp alone had the bits of one process; they share the bound of dp since
rows are padded there, and a product of another height may add in another order elsewhere. Losses
(1.4e-7) and gradient norms (3.7e-7) are sums over all tokens or weights and do not tell the axes
apart. Bounds are four to seven times what was measured.
"""

from dataclasses import dataclass

from glm5.runtime.distributed import Layout

LOSS_BOUND, NORM_BOUND = 1e-6, 2e-6


@dataclass(frozen=True)
class Bounds:
    """Largest errors, as a share of a tensor's largest value."""

    gradients: float
    weights: float
    """After three steps; of exports, too."""


WHOLE = Bounds(gradients=1e-6, weights=5e-6)
EXPERTS = Bounds(gradients=1e-5, weights=1.5e-5)
SUMS = Bounds(gradients=2.5e-5, weights=3e-5)


def bounds_of(layout: Layout) -> Bounds:
    """Those of the axis that rounds most."""
    if max(layout.tp, layout.cp) > 1:
        return SUMS
    return EXPERTS if max(layout.ep, layout.etp) > 1 else WHOLE
