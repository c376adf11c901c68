"""Runs a model on tokens: the one way from token ids to logits."""

from __future__ import annotations

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor, nn

from glm5.errors import DataError
from glm5.model.layer import Glm5TransformerLayer
from glm5.model.replay import Observer, Replay
from glm5.model.tokens import PackedDocuments
from glm5.ops.masks import check_cu_seqlens

# not bool: a mask passed for ids would be read as tokens 0 and 1
_INTEGER_DTYPES = (
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.uint32,
    torch.int64,
)


def packed_documents(
    cu_seqlens: Tensor,
    device: torch.device,
    *,
    replay: Replay | None = None,
    observer: Observer | None = None,
) -> PackedDocuments:
    """Packed documents for a model on `device`; cu_seqlens [n + 1] integer.

    With a replay or an observer they are those of one forward, after which `finish_forward` is due.
    A host sync where cu_seqlens is on a GPU.
    """
    lengths = tuple(cu_seqlens.diff().tolist())
    edges = cu_seqlens.to(device=device, dtype=torch.int32, non_blocking=True)
    return PackedDocuments(
        qkv_format="thd",
        cu_seqlens_q=edges,
        cu_seqlens_kv=edges,
        lengths=lengths,
        replay=replay,
        observer=observer,
    )


def finish_forward(model: nn.Module, documents: PackedDocuments) -> None:
    """Checks what a pipeline stage's forward of `documents` replayed; to be called right after it.

    From here on the layers take their choices again only to recompute their activations.

    Raises:
        ReplayError: choices recorded for one of the stage's layers were not taken.
    """
    layers = {
        layer.layer_number - 1
        for layer in model.modules()
        if isinstance(layer, Glm5TransformerLayer) and not layer.of_mtp
    }
    entries = set() if documents.replay is None else documents.replay.entries()
    documents.ledger.finish(entry for entry in entries if entry[1] in layers)


def logits(
    model: GPTModel,
    token_ids: Tensor,
    cu_seqlens: Tensor | None = None,
    *,
    replay: Replay | None = None,
    observer: Observer | None = None,
) -> Tensor:
    """Next-token logits of packed documents that never see each other.

    token_ids [t] integer, on any device; cu_seqlens [n + 1] int32 or int64, document i is
    [cu_seqlens[i], cu_seqlens[i+1]), default one document; returns [t, vocab_size] in the model's
    dtype, differentiable unless under torch.no_grad().

    Raises:
        DataError: token_ids is not one row of ids of the vocabulary, or cu_seqlens does not span
        it; or one of them is no tensor.
        ReplayError: `replay` is not of this model's layers.
    """
    _check_is_tensor("token_ids", token_ids)
    _check_tokens(token_ids, model.vocab_size)
    device = next(model.parameters()).device
    token_ids = token_ids.to(device=device, dtype=torch.long)
    num_tokens = token_ids.numel()
    if cu_seqlens is None:
        cu_seqlens = torch.tensor([0, num_tokens])
    _check_is_tensor("cu_seqlens", cu_seqlens)
    check_cu_seqlens(cu_seqlens, num_tokens)
    documents = packed_documents(cu_seqlens, device, replay=replay, observer=observer)
    out = model(
        input_ids=token_ids[None],
        position_ids=torch.arange(num_tokens, device=device)[None],
        attention_mask=None,
        packed_seq_params=documents,
    )
    finish_forward(model, documents)
    return out[0]


def _check_is_tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise DataError(
            f"{name} is not a tensor",
            got=type(value).__name__,
            expected="a torch.Tensor of integers",
            remedy=f"pass torch.tensor({name})",
        )


def _check_tokens(token_ids: Tensor, vocab_size: int) -> None:
    if token_ids.dim() != 1 or token_ids.numel() == 0 or token_ids.dtype not in _INTEGER_DTYPES:
        raise DataError(
            "token_ids is not one row of integers",
            got=f"shape {tuple(token_ids.shape)}, {token_ids.dtype}",
            expected="[t] integers, t >= 1",
            remedy="pack several documents end to end and pass cu_seqlens",
        )
    # torch has no minimum of the wider unsigned types
    ids = token_ids.to(torch.long)
    low, high = torch.stack([ids.min(), ids.max()]).tolist()
    if low < 0 or high >= vocab_size:
        raise DataError(
            "token_ids are outside the vocabulary",
            got=f"ids from {low} to {high}",
            expected=f"0 to {vocab_size - 1}",
            remedy="use the tokenizer of this checkpoint",
        )
