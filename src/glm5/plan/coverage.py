"""Whether the shards of a layout hold a checkpoint exactly once, and make it again."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from glm5.checkpoint.convert import is_expert
from glm5.checkpoint.fp8 import SCALE_SUFFIX
from glm5.checkpoint.hf_layout import HfTensor
from glm5.checkpoint.rules import Rule
from glm5.config import Glm5Config
from glm5.plan.published import Part
from glm5.plan.shards import Coordinates, Shard, Target

_EXPERT = re.compile(r"\.mlp\.experts\.(\d+)\.")
# Megatron's MTP layer has a copy of the embedding on its own stage.
EMBEDDING = "model.embed_tokens.weight"

Holders = dict[Part, list[Coordinates]]


class Coverage:
    """Collects what every shard read of every tensor, and says what is wrong with the whole.

    Right is, within each replica of the model: every tensor is read on one pipeline rank; either
    whole, by every rank of that stage (of an expert: by every rank of its expert-parallel rank), or
    cut into equal parts, part k by every rank whose tensor-parallel rank (of an expert: expert
    tensor-parallel rank) is k; no rank reads a tensor twice; and with a part of a float8 weight
    goes the part of its scales that covers it.
    """

    def __init__(
        self, config: Glm5Config, tensors: Mapping[str, HfTensor], ranks: Collection[Coordinates]
    ) -> None:
        self._config = config
        self._tensors = tensors
        self._holders: dict[str, Holders] = defaultdict(lambda: defaultdict(list))
        self._experts_per_rank = config.n_routed_experts // (1 + max(at.ep for at in ranks))
        self._tp = 1 + max(at.tp for at in ranks)
        self._etp = 1 + max(at.etp for at in ranks)
        # the ranks of a stage, and of an expert-parallel rank on it
        self._ranks: dict[tuple[int, int | None], set[Coordinates]] = defaultdict(set)
        for at in ranks:
            self._ranks[at.pp, None].add(at)
            self._ranks[at.pp, at.ep].add(at)

    def add(self, shard: Shard) -> None:
        """One distinct shard."""
        for name, part in shard.reads:
            self._holders[name][part].append(shard.at)

    def problems(self) -> Iterator[str]:
        """One line per tensor that is not held exactly once."""
        for name, tensor in self._tensors.items():
            if name.endswith(SCALE_SUFFIX):
                found = self._scale_problem(name)
            else:
                found = self._problem(name, tensor)
            if found is not None:
                yield f"{name}: {found}"
        for name in self._holders.keys() - self._tensors.keys():
            yield f"{name}: read, but not in the checkpoint"

    def _problem(self, name: str, tensor: HfTensor) -> str | None:
        holders = self._holders.get(name)
        if not holders:
            return "no rank reads it"
        everyone = [at for ranks in holders.values() for at in ranks]
        stages = sorted({at.pp for at in everyone})
        if len(stages) > 1 and not (name == EMBEDDING and self._config.num_nextn_predict_layers):
            return f"read on pipeline stages {stages}"
        if len(everyone) != len(set(everyone)):
            return "read twice by the same rank"
        for stage in stages:
            held = {p: {at for at in ranks if at.pp == stage} for p, ranks in holders.items()}
            if problem := self._stage_problem(name, tensor, stage, held):
                return problem
        return None

    def _stage_problem(
        self, name: str, tensor: HfTensor, stage: int, held: dict[Part, set[Coordinates]]
    ) -> str | None:
        for part, ranks in self._expected(name, tensor.shape, stage, next(iter(held)).dim):
            if held.get(part, set()) != ranks:
                missing = len(ranks - held.get(part, set()))
                return f"{_spell(part)} is missing on {missing} of the {len(ranks)} ranks it is for"
            held.pop(part)
        if held:
            return f"{', '.join(map(_spell, held))} read beside the right parts"
        return None

    def _expected(
        self, name: str, shape: tuple[int, ...], stage: int, dim: int | None
    ) -> list[tuple[Part, set[Coordinates]]]:
        """The right parts with their right holders, if the tensor is cut along `dim`."""
        ranks = self._should_hold(name, stage)
        if dim is None:
            return [(Part(None, 0, shape[0]), ranks)]
        by_expert = _EXPERT.search(name) is not None
        count = self._etp if by_expert else self._tp
        size = shape[dim] // count
        return [
            (
                Part(dim, k * size, (k + 1) * size),
                {at for at in ranks if (at.etp if by_expert else at.tp) == k},
            )
            for k in range(count)
        ]

    def _should_hold(self, name: str, stage: int) -> set[Coordinates]:
        expert = _EXPERT.search(name)
        return self._ranks[
            stage, None if expert is None else int(expert[1]) // self._experts_per_rank
        ]

    def _scale_problem(self, name: str) -> str | None:
        assert self._config.fp8 is not None
        block = self._config.fp8.weight_block_size
        expected: Holders = defaultdict(list)
        for part, ranks in self._holders.get(name.removesuffix(SCALE_SUFFIX), {}).items():
            size = block[part.dim or 0]
            first, last = part.start // size, -(-part.stop // size)
            expected[Part(part.dim, first, last)] += ranks
        found = self._holders.get(name, {})
        same = {part: sorted(ranks) for part, ranks in found.items()} == {
            part: sorted(ranks) for part, ranks in expected.items()
        }
        return None if same else "its parts do not cover the parts of the weight"


def _spell(part: Part) -> str:
    return "the whole" if part.dim is None else f"dim {part.dim} [{part.start}, {part.stop})"


class Reverse:
    """Makes the Hugging Face tensors again from the shards' Megatron tensors.

    Shapes go through the rules as meta tensors, and order as numbered rows: row i of a source must
    come back as row i, whatever the rule and the cut do in between.
    """

    def __init__(self, tensors: Mapping[str, HfTensor]) -> None:
        self._tensors = tensors
        self._targets: dict[str, dict[int, Target]] = defaultdict(dict)

    def add(self, shard: Shard) -> None:
        """One distinct shard."""
        for name, target in shard.targets.items():
            part = shard.at.etp if is_expert(name) else shard.at.tp
            self._targets[name][part if target.dim is not None else 0] = target

    def names(self) -> set[str]:
        """Every Megatron tensor of any shard."""
        return set(self._targets)

    def problems(self, rules: Sequence[Rule]) -> Iterator[str]:
        """One line per rule that does not make its sources again."""
        for rule in rules:
            parts = self._targets.get(rule.mcore_name)
            if parts is None:
                yield f"{rule.mcore_name}: no rank holds it"
            elif problem := self._problem(rule, [parts[k] for k in sorted(parts)]):
                yield f"{', '.join(rule.hf_names)}: {problem}"

    def _problem(self, rule: Rule, parts: list[Target]) -> str | None:
        dim = parts[0].dim
        made = rule.join([torch.empty(part.shape, device="meta") for part in parts], dim)
        shapes = [tuple(tensor.shape) for tensor in made]
        expected = [self._tensors[name].shape for name in rule.hf_names]
        if shapes != expected:
            return f"made as {shapes}, published as {expected}"
        numbered = _Numbered(self._tensors, dim or 0)
        loaded = [
            rule.load(numbered, tp_rank=rank, tp_size=len(parts), partition_dim=dim)
            for rank in range(len(parts))
        ]
        for name, again in zip(rule.hf_names, rule.join(loaded, dim), strict=True):
            if not torch.equal(again, numbered.read(name)):
                return f"the rows of {name} come back in another order"
        return None


class _Numbered:
    """A TensorReader whose tensors are one wide but along `dim`, where they number their rows.

    Tensors that one rule could confuse have numbers of their own.
    """

    def __init__(self, tensors: Mapping[str, HfTensor], dim: int) -> None:
        self._tensors = tensors
        self._dim = dim
        self._first: dict[str, int] = {}

    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        whole = self._tensors[name].shape
        return tuple(size if dim == self._dim else 1 for dim, size in enumerate(whole))

    def dtype(self, name: str) -> torch.dtype:
        del name
        return torch.int64

    def file_of(self, name: str) -> Path:
        return Path(name)

    def read(self, name: str) -> Tensor:
        size = self._tensors[name].shape[self._dim]
        first = self._first.setdefault(name, len(self._first) << 32)
        return torch.arange(first, first + size).view(self.shape(name))

    def read_slice(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        return self.read(name).narrow(dim, start, stop - start)

    def close(self) -> None:
        """There are no files."""
