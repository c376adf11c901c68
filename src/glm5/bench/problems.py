"""One computation, several implementations of it: checked, then handed out to be timed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from glm5.bench.ceilings import Work
from glm5.bench.timing import poison_free_memory

OURS = "triton"
PLAIN = "torch"
Function = Callable[..., Any]


class Verdict(NamedTuple):
    """Relative error of each output, and whether all are small enough."""

    errors: tuple[float, ...]
    ok: bool
    failure: str | None = None
    """Why there are no outputs; None where there are."""


class Problem(Protocol):
    """What the runner needs of a computation."""

    case: str
    works: Mapping[str, Work]
    """Name of each timed operation, such as "forward", and what it has to do."""

    def names(self) -> Sequence[str]:
        """The implementations; OURS is one of them."""

    def check(self, name: str) -> Verdict:
        """Whether the implementation computes what it should."""

    def operations(self, name: str) -> Sequence[str]:
        """Which of the works are the implementation's own."""

    def timed(self, name: str) -> dict[str, Callable[[], object]]:
        """A function without arguments for each of the works."""


def relative_errors(results: Sequence[Tensor], exact: Sequence[Tensor]) -> tuple[float, ...]:
    """||x - exact|| / ||exact|| of each; NaN where an element was not written."""
    pairs = zip(results, exact, strict=True)
    return tuple(((x.float() - y.float()).norm() / y.float().norm()).item() for x, y in pairs)


def within_twice(errors: Sequence[float], of_plain: Sequence[float]) -> bool:
    """Whether each error is at most twice that of plain PyTorch in the same dtype; NaN is not."""
    return all(e <= 2 * p + 1e-6 for e, p in zip(errors, of_plain, strict=True))


@dataclass
class GradientProblem:
    """A differentiable function: its outputs and its gradients, forward and backward apart.

    exact is given the inputs in fp32. functions hold OURS and PLAIN and return the same outputs,
    of which the first is differentiated, with grad.
    """

    case: str
    works: Mapping[str, Work]
    inputs: tuple[Tensor, ...]
    grad: Tensor
    functions: Mapping[str, Function]
    exact: Function
    only: Mapping[str, str] = field(default_factory=dict)
    """The one operation of an implementation that is its own; all of them where none is named."""
    _known: dict[str, tuple[float, ...]] = field(default_factory=dict)
    _exact: tuple[Tensor, ...] | None = None

    def names(self) -> Sequence[str]:
        """All implementations."""
        return list(self.functions)

    def operations(self, name: str) -> Sequence[str]:
        """All of the works, but for those of which only one is the implementation's own."""
        return [self.only[name]] if name in self.only else list(self.works)

    def check(self, name: str) -> Verdict:
        """Errors of outputs and gradients, against twice those of plain PyTorch."""
        if self._exact is None:
            wide = tuple(x.float() for x in self.inputs)
            self._exact = _results(self.exact, wide, self.grad.float())
        errors = self._errors(name)
        return Verdict(errors, within_twice(errors, self._errors(PLAIN)))

    def _errors(self, name: str) -> tuple[float, ...]:
        assert self._exact is not None, "check computes the exact results first"
        if name not in self._known:
            if self.grad.is_cuda:
                poison_free_memory(4 * max(x.nbytes for x in self.inputs))
            results = _results(self.functions[name], self.inputs, self.grad)
            self._known[name] = relative_errors(results, self._exact)
        return self._known[name]

    def timed(self, name: str) -> dict[str, Callable[[], object]]:
        """Forward under autograd; backward of one graph that is kept."""
        self._exact = None  # its memory is needed
        leaves = tuple(x.detach().requires_grad_() for x in self.inputs)
        function = self.functions[name]
        graph: list[Tensor] = []

        def backward() -> object:
            if not graph:
                graph.append(function(*leaves)[0])
            return torch.autograd.grad(graph[0], leaves, self.grad, retain_graph=True)

        return {"forward": lambda: function(*leaves), "backward": backward}


def _results(function: Function, inputs: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, ...]:
    leaves = tuple(x.detach().requires_grad_() for x in inputs)
    outputs = function(*leaves)
    grads = torch.autograd.grad(outputs[0], leaves, grad.to(outputs[0].dtype))
    return tuple(x.detach() for x in (*outputs, *grads))


@dataclass
class SelectionProblem:
    """Top-k selection: right where the scores decide it, free where they tie within rounding."""

    case: str
    works: Mapping[str, Work]
    functions: Mapping[str, Callable[[], Tensor]]
    exact_scores: Callable[[int], Tensor]
    """Row -> [num_valid] fp64 scores of its valid keys, which are the first ones."""
    plain_scores: Callable[[int], Tensor]
    """The same in plain bf16 PyTorch."""
    rows: Sequence[int]
    """The rows that are checked."""
    topk: int

    def names(self) -> Sequence[str]:
        """All implementations."""
        return list(self.functions)

    def operations(self, name: str) -> Sequence[str]:
        """The selection, whoever makes it."""
        del name
        return list(self.works)

    def check(self, name: str) -> Verdict:
        """How far the worst selected score lies below the true topk-th, against twice the error
        of plain scores. A row with the wrong number of keys, or a key twice, is infinitely off."""
        selected = self.functions[name]()
        if name == OURS and not torch.equal(selected, self.functions[name]()):
            return Verdict((float("inf"),), False)
        found = [self._shortfall(selected[row], row) for row in self.rows]
        worst = max(found, key=lambda pair: pair[0] - pair[1])
        return Verdict((worst[0],), all(short <= allowed for short, allowed in found))

    def _shortfall(self, selected: Tensor, row: int) -> tuple[float, float]:
        exact, plain = self.exact_scores(row), self.plain_scores(row)
        keys = selected[selected >= 0].long()
        num_expected = min(self.topk, len(exact))
        allowed = 2 * (plain.double() - exact).abs().max().item()
        if len(keys) != num_expected or len(keys.unique()) != num_expected:
            return float("inf"), allowed
        if keys.max() >= len(exact):
            return float("inf"), allowed
        return (exact.topk(num_expected).values[-1] - exact[keys].min()).item(), allowed

    def timed(self, name: str) -> dict[str, Callable[[], object]]:
        """The whole selection."""
        return {"select": self.functions[name]}
