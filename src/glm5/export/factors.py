"""The adapters of a Megatron-Core model under the names of the Hugging Face linears."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from glm5.checkpoint.adapter_io import LoraAdapter, LoraFactors
from glm5.checkpoint.adapter_pairs import local_pairs
from glm5.checkpoint.convert import partition_dim
from glm5.checkpoint.trained import trained_modules
from glm5.lora.attach import adapted_modules
from glm5.lora.experts import GroupedLora
from glm5.lora.factors import Adapted
from glm5.lora.spec import ExpertLora


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """This rank's part of a tensor: number `part` along `dim`, which is None where it is whole."""

    tensor: Tensor
    dim: int | None
    part: int


@dataclass(frozen=True, slots=True, eq=False)
class PairPiece:
    """This rank's part of one pair."""

    a: Piece
    b: Piece
    scale: float


@dataclass(frozen=True, slots=True, eq=False)
class AdapterPieces:
    """What one rank has of an adapter; of ranks that hold the same, one has it here."""

    pairs: dict[str, PairPiece]
    modules: dict[str, Piece]
    expert_lora: ExpertLora


def trained_adapter(model: GPTModel, dtype: torch.dtype) -> LoraAdapter:
    """Every adapter of a whole model, a [rank, in] and b [out, rank], and the whole parameters that
    train beside them, all in `dtype`. A factor that experts share is one tensor."""
    return join_adapter([adapter_pieces([model], dtype)])


def adapter_pieces(
    chunks: Sequence[GPTModel], dtype: torch.dtype, device: torch.device | None = None
) -> AdapterPieces:
    """What this rank has to give of the adapter, in `dtype`, on `device` or where it is."""
    converted: dict[tuple[int, torch.Size], Tensor] = {}

    def convert(tensor: Tensor) -> Tensor:
        place = (tensor.data_ptr(), tensor.shape)
        if place not in converted:
            converted[place] = tensor.detach().to(device=device, dtype=dtype)
        return converted[place]

    pairs: dict[str, PairPiece] = {}
    modules: dict[str, Piece] = {}
    for chunk in chunks:
        for path, module, pair in local_pairs(chunk):
            if _gives(module):
                dim_a, dim_b = {"row": (1, None), "column": (None, 0), "whole": (None, None)}[
                    module.split
                ]
                part = module.ranks.rank()
                pairs[path] = PairPiece(
                    Piece(convert(pair.a), dim_a, part),
                    Piece(convert(pair.b), dim_b, part),
                    pair.scale,
                )
        for name, tensor in trained_modules(chunk).items():
            dim, rank = partition_dim(tensor), parallel_state.get_tensor_model_parallel_rank()
            if _is_first_replica() and (dim is not None or rank == 0):
                # what did not train keeps the dtype that it was read in
                value = convert(tensor) if tensor.requires_grad else tensor.detach().to(device)
                modules[name] = Piece(value, dim, rank)
    return AdapterPieces(pairs, modules, _expert_lora(chunks))


def join_adapter(ranks: Sequence[AdapterPieces]) -> LoraAdapter:
    """The whole adapter from what all ranks gave."""
    factors = {
        path: LoraFactors(
            _join(piece.a for piece in pieces), _join(piece.b for piece in pieces), pieces[0].scale
        )
        for path, pieces in _by_name(rank.pairs for rank in ranks)
    }
    modules = {name: _join(pieces) for name, pieces in _by_name(rank.modules for rank in ranks)}
    layouts = {rank.expert_lora for rank in ranks} - {"none"}
    assert len(layouts) <= 1, "experts have one layout"
    return LoraAdapter(factors, layouts.pop() if layouts else "none", modules)


def _gives(module: Adapted) -> bool:
    """Whether this rank is the one of its replicas that gives a pair."""
    if isinstance(module, GroupedLora):
        return parallel_state.get_expert_data_parallel_rank() == 0
    return _is_first_replica() and (module.split != "whole" or module.ranks.rank() == 0)


def _is_first_replica() -> bool:
    return parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0


def _by_name[T](ranks: Iterable[dict[str, T]]) -> Iterator[tuple[str, list[T]]]:
    together: dict[str, list[T]] = {}
    for pieces in ranks:
        for name, piece in pieces.items():
            together.setdefault(name, []).append(piece)
    yield from together.items()


def _join(pieces: Iterable[Piece]) -> Tensor:
    ordered = sorted(pieces, key=lambda piece: piece.part)
    first = ordered[0]
    if first.dim is None or len(ordered) == 1:
        return first.tensor
    return torch.cat([piece.tensor for piece in ordered], dim=first.dim)


def _expert_lora(chunks: Sequence[GPTModel]) -> ExpertLora:
    grouped = [
        module
        for chunk in chunks
        for _, module in adapted_modules(chunk)
        if isinstance(module, GroupedLora)
    ]
    if not grouped:
        return "none"
    return "shared_outer" if any(module.shares_factors for module in grouped) else "per_expert"
