"""Streams tensors between a Hugging Face checkpoint and a Megatron-Core model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypedDict

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from torch import Tensor, nn

from glm5.checkpoint.block_scaled import fill_block_scaled
from glm5.checkpoint.rules import Rule, check_total
from glm5.checkpoint.safetensors_io import TensorReader
from glm5.errors import CheckpointError
from glm5.lora.attach import base_name, is_adapter
from glm5.model.frozen import BlockScaledWeight
from glm5.model.names import GlobalNames, by_expert
from glm5.ops.block_scaled import BlockScaled

EXPERT_BIAS = ".router.expert_bias"


def mcore_tensors(model: GPTModel) -> dict[str, Tensor]:
    """This rank's tensors of a checkpoint by global Megatron name: parameters and router biases.

    Stacked experts one by one, as views through which one can write.
    """
    global_name = GlobalNames(model)
    named = [*model.named_parameters(), *model.named_buffers()]
    return {
        global_name(base_name(one)): view
        for name, tensor in named
        if not is_adapter(name) and (isinstance(tensor, nn.Parameter) or name.endswith(EXPERT_BIAS))
        for one, view in by_expert(name, tensor)
    }


def block_scaled_tensors(model: GPTModel) -> dict[str, BlockScaled]:
    """Those of `mcore_tensors` that are in float8, with their scales."""
    global_name, found = GlobalNames(model), {}
    for path, module in model.named_modules():
        if isinstance(module, BlockScaledWeight):
            name = base_name(f"{path}.weight")
            parts = zip(
                by_expert(name, module.weight),
                by_expert(name, module.weight_scale_inv),
                strict=True,
            )
            for (one, values), (_, scales) in parts:
                found[global_name(one)] = BlockScaled(values, scales, module.block)
    return found


def load_hf_weights(
    chunks: Sequence[GPTModel],
    reader: TensorReader,
    rules: Iterable[Rule],
    *,
    unused: Iterable[str] = (),
    exact: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Fills this rank's part of every tensor from the checkpoint, one rule at a time; collective.

    `unused` are tensors of the checkpoint that this model has no place for (an MTP layer that is
    not built). With `exact` a value that the model's dtype cannot hold is an error, else it is
    rounded. What the model holds in float8 is read as it is or quantised: see fill_block_scaled.
    Memory: the rank's model and its largest tensor; no other bytes are read. `progress` hears of
    (bytes filled, of how many), after each target.

    Raises:
        CheckpointError: a source or target is missing, extra, repeated, or of another shape.
    """
    rules = list(rules)
    targets: dict[str, Tensor | BlockScaled] = {}
    for chunk in chunks:
        targets |= mcore_tensors(chunk)
        targets |= block_scaled_tensors(chunk)
    left_out = set(unused)
    sources = [name for name in reader.names() if name not in left_out]
    check_total(rules, sources, _names_on_all_ranks(targets))
    fill_targets(targets, rules, reader, exact=exact, progress=progress)


@torch.no_grad()
def fill_targets(
    targets: Mapping[str, Tensor | BlockScaled],
    rules: Iterable[Rule],
    reader: TensorReader,
    *,
    exact: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Reads the parts of `targets`, of this rank's `mcore_tensors`, and of nothing else.

    Raises:
        CheckpointError: a source cannot be cut for this rank, or is of another shape.
    """
    done, total = 0, sum(target.nbytes for target in targets.values())
    for rule in rules:
        target = targets.get(rule.mcore_name)
        if target is None:
            continue
        if isinstance(target, BlockScaled):
            fill_block_scaled(target, rule, reader, **_share(rule, target.values))
        else:
            source = load_part(rule, reader, target)
            _check_shape(rule, reader, source, target)
            target.copy_(source)
            if exact:
                _check_kept(rule, reader, source, target)
        done += target.nbytes
        progress(done, total)


def hf_weights(tensors: dict[str, Tensor], rules: Iterable[Rule]) -> Iterator[tuple[str, Tensor]]:
    """Undoes `load_hf_weights`: Hugging Face names and tensors, views where the rule allows."""
    rules = list(rules)
    check_total(rules, [name for rule in rules for name in rule.hf_names], list(tensors))
    for rule in rules:
        yield from zip(rule.hf_names, rule.to_hf(tensors[rule.mcore_name]), strict=True)


def _names_on_all_ranks(targets: Iterable[str]) -> set[str]:
    """Targets of this rank and of those that hold the rest of the model."""
    everywhere: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everywhere, list(targets))
    return {name for names in everywhere for name in names}


def load_part(rule: Rule, reader: TensorReader, target: Tensor) -> Tensor:
    """This rank's part of a tensor that is not in float8."""
    return rule.load(reader, **_share(rule, target))


class _Share(TypedDict):
    tp_rank: int
    tp_size: int
    partition_dim: int | None


def _share(rule: Rule, target: Tensor) -> _Share:
    """Which part of a tensor this rank has; experts are cut over ranks of their own."""
    dim = partition_dim(target)
    if dim is None:
        return _Share(tp_rank=0, tp_size=1, partition_dim=None)
    if is_expert(rule.mcore_name):
        group = parallel_state.get_expert_tensor_parallel_group()
    else:
        group = parallel_state.get_tensor_model_parallel_group()
    return _Share(tp_rank=group.rank(), tp_size=group.size(), partition_dim=dim)


def partition_dim(target: Tensor) -> int | None:
    """The dimension along which tensor-parallel ranks cut a tensor, None where all have it."""
    if not getattr(target, "tensor_model_parallel", False):
        return None
    return int(target.partition_dim)  # type: ignore[attr-defined]


def is_expert(mcore_name: str) -> bool:
    """Whether a tensor is a routed expert's, whose tensor-parallel ranks are others."""
    return ".experts." in mcore_name


def _check_kept(rule: Rule, reader: TensorReader, source: Tensor, target: Tensor) -> None:
    """transformers may save an fp32 router in a bf16 checkpoint; rounding it moves tokens."""
    if source.dtype == target.dtype or torch.equal(target.to(source), source):
        return
    raise CheckpointError(
        f"{', '.join(rule.hf_names)} in {reader.file_of(rule.hf_names[0])} would be rounded",
        got=f"{source.dtype} with values that {target.dtype} does not have",
        expected=f"values of the checkpoint's own dtype, {target.dtype}",
        remedy="pass dtype='float32' to load_model, or make config.json's dtype float32",
    )


def _check_shape(rule: Rule, reader: TensorReader, source: Tensor, target: Tensor) -> None:
    if source.shape != target.shape:
        raise CheckpointError(
            f"{', '.join(rule.hf_names)} in {reader.file_of(rule.hf_names[0])} has the wrong shape",
            got=tuple(source.shape),
            expected=tuple(target.shape),
            remedy="check that config.json and the weights belong together",
        )
