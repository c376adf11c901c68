"""Observes the `transformers` model, one document at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from glm5.checkpoint.dequantise import as_float8_base, readable_by_transformers
from glm5.checkpoint.hf_model import load_hf_model
from glm5.config import Glm5Config
from glm5.parity.observation import Observation, document_slices, next_token_loss


def load_reference(folder: Path, glm5: Glm5Config, device: torch.device) -> Any:
    """The `transformers` model of a local folder, FP8 or not, in fp32 on `device`.

    Raises:
        ConfigError, CheckpointError: transformers is too old, or cannot express or load the model.
    """
    with readable_by_transformers(folder, glm5) as readable:
        return load_hf_model(readable, glm5).to(device)


def load_float8_reference(folder: Path, glm5: Glm5Config, device: torch.device) -> Any:
    """The same of what `base_weights` "fp8" makes of the folder, dequantised without rounding."""
    with as_float8_base(folder, glm5) as readable:
        return load_hf_model(readable, glm5).to(device)


def observe_hf(
    model: Any,
    token_ids: Tensor,
    lengths: Sequence[int],
    *,
    selected: dict[int, Tensor] | None = None,
    gradients: bool = True,
) -> Observation:
    """Runs every document alone and joins them; `selected` replaces the indexers' choices."""
    model.zero_grad(set_to_none=True)
    parts = [
        _observe_document(model, token_ids[part], part.start, _cut(selected, part))
        for part in document_slices(lengths)
    ]
    joined = _join(parts, token_ids.numel())
    if gradients:
        next_token_loss(joined.logits, token_ids, lengths).backward()
        joined.gradients = dict(_disk_gradients(model))
    joined.logits = joined.logits.detach()
    return joined


class _SeeTopk(TorchFunctionMode):
    """Keeps the scores that an indexer hands to topk; transformers does not return them."""

    def __init__(self) -> None:
        super().__init__()
        self.scores: Tensor | None = None

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in (torch.topk, torch.Tensor.topk):
            self.scores = args[0].detach()
        return func(*args, **(kwargs or {}))


def _observe_document(
    model: Any, token_ids: Tensor, offset: int, selected: dict[int, Tensor] | None
) -> Observation:
    seen = Observation(logits=token_ids)
    handles = []
    for index, layer in enumerate(model.model.layers):
        handles.append(layer.register_forward_hook(_hidden_hook(seen, index)))
        if layer.self_attn.indexer is not None:
            handles += _indexer_hooks(layer.self_attn.indexer, seen, index, offset, selected)
    try:
        seen.logits = model(input_ids=token_ids[None], use_cache=False).logits[0]
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _hidden_hook(seen: Observation, index: int) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, output: tuple[Tensor, ...]) -> None:
        seen.hidden[index] = output[0][0].detach()

    return hook


def _indexer_hooks(
    indexer: nn.Module,
    seen: Observation,
    index: int,
    offset: int,
    selected: dict[int, Tensor] | None,
) -> list[Any]:
    spy = _SeeTopk()

    def before(module: nn.Module, args: Any) -> None:
        spy.__enter__()

    def after(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        spy.__exit__(None, None, None)
        assert spy.scores is not None
        seen.scores[index] = spy.scores[0].float()
        seen.selected[index] = output[0] + offset
        if selected is None or index not in selected:
            return None
        return _padded(selected[index] - offset)[None]

    return [
        indexer.register_forward_pre_hook(before),
        indexer.register_forward_hook(after, always_call=True),
    ]


def _padded(selected: Tensor) -> Tensor:
    """transformers has no empty entries: repeat the first key, which changes no mask."""
    return torch.where(selected < 0, selected[:, :1], selected)


def _cut(selected: dict[int, Tensor] | None, part: slice) -> dict[int, Tensor] | None:
    return selected and {layer: indices[part] for layer, indices in selected.items()}


def _join(parts: list[Observation], total: int) -> Observation:
    first = parts[0]
    device = first.logits.device
    joined = Observation(logits=torch.cat([part.logits for part in parts]))
    for layer in first.hidden:
        joined.hidden[layer] = torch.cat([part.hidden[layer] for part in parts])
    for layer in first.scores:
        scores = [part.scores[layer] for part in parts]
        joined.scores[layer] = torch.block_diag(*scores)
        width = max(part.selected[layer].shape[1] for part in parts)
        selected = torch.full((total, width), -1, dtype=torch.int32, device=device)
        for part, rows in zip(parts, document_slices([s.shape[0] for s in scores]), strict=True):
            selected[rows, : part.selected[layer].shape[1]] = part.selected[layer]
        joined.selected[layer] = selected
    return joined


def _disk_gradients(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Gradients under the names of the files: transformers fuses the experts in memory only."""
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        stem, _, leaf = name.rpartition(".")
        if leaf == "gate_up_proj":
            for expert, gradient in enumerate(parameter.grad):
                gate, up = gradient.chunk(2)
                yield f"{stem}.{expert}.gate_proj.weight", gate
                yield f"{stem}.{expert}.up_proj.weight", up
        elif leaf == "down_proj":
            for expert, gradient in enumerate(parameter.grad):
                yield f"{stem}.{expert}.down_proj.weight", gradient
        else:
            yield name, parameter.grad
