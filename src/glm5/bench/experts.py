"""The measured cases of the routed experts: those of GLM-5.2, 8,192 tokens in 8 experts each."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from glm5.bench import plain
from glm5.bench.ceilings import Work
from glm5.bench.draw import draw_from
from glm5.bench.peers import Peers
from glm5.bench.problems import OURS, PLAIN, Function, GradientProblem
from glm5.ops.grouped import GroupedPair, grouped_linear
from glm5.ops.grouped.reference import grouped_linear_reference

HIDDEN, INTERMEDIATE = 6144, 2048
ROWS, RANK = 65536, 16
SCALE = 2.0

Routing = Literal["even", "skewed", "random"]
_UNEVEN: tuple[tuple[int, Routing], ...] = ((256, "random"), (32, "skewed"))


class Experts(NamedTuple):
    """One linear of `num` experts, frozen, with pairs or without."""

    linear: str
    num: int
    pairs: str
    """"none", "per expert" or "shared outer"."""
    routing: Routing = "even"
    """Every expert has as many rows; one has 60 % ("skewed"); or each row chose one by chance."""

    @property
    def name(self) -> str:
        """The case's name."""
        routing = "" if self.routing == "even" else f", {self.routing}"
        pairs = "base alone" if self.pairs == "none" else f"LoRA {self.pairs}"
        return f"experts {self.linear}, {self.num}{routing}, {pairs}"


EXPERTS = (
    *(
        Experts(linear, num, pairs)
        for num in (256, 32)
        for linear in ("fc1", "fc2")
        for pairs in ("none", "per expert", "shared outer")
    ),
    *(
        Experts(linear, num, pairs, routing)
        for num, routing in _UNEVEN
        for linear in ("fc1", "fc2")
        for pairs in ("none", "per expert")
    ),
)


def group_ends(num: int, num_rows: int, routing: Routing) -> Tensor:
    """[num] int32: where each expert's rows end."""
    if routing == "random":
        chosen = torch.randint(num, (num_rows,), generator=torch.Generator().manual_seed(0))
        return torch.bincount(chosen, minlength=num).cumsum(0).int()
    sizes = torch.full((num,), num_rows // num)
    if routing == "skewed":
        sizes.fill_(num_rows * 2 // 5 // (num - 1))
    sizes[num // 3] += num_rows - sizes.sum()
    return sizes.cumsum(0).int()


def experts_problem(case: Experts, peers: Peers) -> GradientProblem:
    """grouped_linear on random rows; gradients of the rows and of the factors."""
    draw, n, is_fc1 = draw_from(case.name), case.num, case.linear == "fc1"
    num_pairs, fan_out, fan_in = (2, INTERMEDIATE, HIDDEN) if is_fc1 else (1, HIDDEN, INTERMEDIATE)
    out_features = num_pairs * fan_out
    weight = torch.stack([draw(out_features, fan_in) * fan_in**-0.5 for _ in range(n)])
    ends = group_ends(n, ROWS, case.routing).cuda()
    factors: tuple[Tensor, ...] = ()
    if case.pairs != "none":
        is_shared = case.pairs == "shared outer"
        num_a, num_b = (1 if is_shared and is_fc1 else n), (1 if is_shared and not is_fc1 else n)
        for _ in range(num_pairs):
            factors += (draw(num_a, RANK, fan_in) * fan_in**-0.5, draw(num_b, fan_out, RANK))
    x, grad = draw(ROWS, fan_in), draw(ROWS, out_features)

    def bound(function: Function, weight: Tensor = weight) -> Function:
        def run(x: Tensor, *factors: Tensor) -> tuple[Tensor]:
            halves = zip(factors[::2], factors[1::2], strict=True)
            pairs = [GroupedPair(a, b, SCALE) for a, b in halves]
            return (function(x, weight, ends, pairs),)

        return run

    def exact(*leaves: Tensor) -> tuple[Tensor]:
        # The wide weight lives for this call alone.
        result: tuple[Tensor] = bound(grouped_linear_reference, weight.float())(*leaves)
        return result

    functions: dict[str, Function] = {OURS: grouped_linear, PLAIN: plain.grouped_linear}
    functions |= peers.grouped_linear
    flops = 2 * ROWS * fan_in * out_features
    pair_flops = 2 * ROWS * RANK * (fan_in * num_pairs + out_features) if factors else 0
    moved = x.nbytes + grad.nbytes + weight.nbytes
    return GradientProblem(
        case=case.name,
        works={
            "forward": Work(flops + pair_flops, moved),
            "backward": Work(flops + 2 * pair_flops, moved + (x.nbytes if factors else 0)),
        },
        inputs=(x, *factors),
        grad=grad,
        functions={who: bound(function) for who, function in functions.items()},
        exact=exact,
    )
