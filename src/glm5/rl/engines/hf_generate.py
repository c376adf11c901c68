"""Generation with a `transformers` model: our own loop, so that every draw has its own seed."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from glm5.rl.engines.draw import draw_tokens
from glm5.rl.engines.hf_record import HfRecorder, Record
from glm5.rl.rollout import Request, Sampling


@dataclass
class Completion:
    """What one request has drawn so far.

    tokens, log_probs: of the response. experts, keys: pieces of the record along the tokens that
    were queries, as `HfRecorder.take` gives them, without their batch dim; empty if not recorded.
    """

    request: Request
    stream: torch.Generator
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    experts: list[Record] = field(default_factory=list)
    keys: list[Record] = field(default_factory=list)

    def is_finished(self, sampling: Sampling) -> bool:
        stopped = bool(self.tokens) and self.tokens[-1] in sampling.stop_token_ids
        return stopped or len(self.tokens) >= sampling.max_new_tokens


@torch.inference_mode()
def complete(
    model: Any, requests: Sequence[Request], sampling: Sampling, recorder: HfRecorder
) -> list[Completion]:
    """One completion for each request, all in one batch, padded on the left.

    Left padding and the key cache change results by rounding only: padding lies outside the causal
    mask of attention and indexer alike, positions count from the row's first token, and the cache
    holds the indexer's keys. The tests compare with one full forward of each row alone.
    """
    completions = [_start(request) for request in requests]
    with recorder.watching(model):
        _run(model, completions, sampling, recorder)
    return completions


def _start(request: Request) -> Completion:
    return Completion(request, torch.Generator().manual_seed(request.seed))


def _run(
    model: Any, completions: list[Completion], sampling: Sampling, recorder: HfRecorder
) -> None:
    device = next(model.parameters()).device
    rows = completions
    token_ids, mask = _left_padded([row.request.prompt_ids for row in rows], device)
    cache = _new_cache(model)
    cache_argument = {_cache_name(model): cache}
    while True:
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -token_ids.shape[1] :]
        logits = _forward(model, token_ids, mask, positions, cache_argument)
        _record(rows, recorder, mask, positions)
        drawn = _draw(rows, logits, sampling)
        going = [i for i, row in enumerate(rows) if not row.is_finished(sampling)]
        if not going:
            return
        if len(going) < len(rows):
            kept = torch.tensor(going, device=device)
            rows = [rows[i] for i in going]
            cache.reorder_cache(kept)
            mask, drawn = mask[kept], drawn[kept]
        token_ids = drawn[:, None]
        mask = torch.cat([mask, mask.new_ones(len(rows), 1)], dim=1)


def _left_padded(
    prompts: Sequence[NDArray[np.int32]], device: torch.device
) -> tuple[Tensor, Tensor]:
    """(token ids, 1 where there is a token) [b, longest prompt] int64."""
    longest = max(len(prompt) for prompt in prompts)
    token_ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
    mask = torch.zeros_like(token_ids)
    for row, prompt in enumerate(prompts):
        token_ids[row, longest - len(prompt) :] = torch.from_numpy(prompt.astype(np.int64))
        mask[row, longest - len(prompt) :] = 1
    return token_ids.to(device), mask.to(device)


def _new_cache(model: Any) -> Any:
    from transformers import DynamicCache

    return DynamicCache(config=model.config)


def _cache_name(model: Any) -> str:
    """transformers 5.24 renamed the argument."""
    is_renamed = "cache" in inspect.signature(model.forward).parameters
    return "cache" if is_renamed else "past_key_values"


def _forward(
    model: Any, token_ids: Tensor, mask: Tensor, positions: Tensor, cache: dict[str, Any]
) -> Tensor:
    """Logits [b, vocab] of the last token of every row."""
    output = model(
        input_ids=token_ids,
        attention_mask=mask,
        position_ids=positions,
        use_cache=True,
        logits_to_keep=1,
        **cache,
    )
    logits: Tensor = output.logits[:, -1]
    return logits


def _record(rows: list[Completion], recorder: HfRecorder, mask: Tensor, positions: Tensor) -> None:
    first_keys = mask.shape[1] - mask.sum(-1)
    experts, keys = recorder.take(first_keys, positions)
    for index, row in enumerate(rows):
        # a prompt's queries stand behind its padding, a drawn token stands alone
        num_queries = 1 if row.tokens else len(row.request.prompt_ids)
        if experts is not None:
            row.experts.append(experts[index, -num_queries:])
        if keys is not None:
            row.keys.append(keys[index, -num_queries:])


def _draw(rows: list[Completion], logits: Tensor, sampling: Sampling) -> Tensor:
    """[b] int64; every row draws from its own stream, on the CPU, so that no device matters."""
    uniforms = torch.cat([torch.rand(1, dtype=torch.float64, generator=r.stream) for r in rows])
    tokens, log_probs = draw_tokens(
        logits,
        uniforms.to(logits.device),
        temperature=sampling.temperature,
        top_p=sampling.top_p,
    )
    for row, token, log_prob in zip(rows, tokens.tolist(), log_probs.tolist(), strict=True):
        row.tokens.append(token)
        row.log_probs.append(log_prob)
    return tokens
