"""What every engine checks: the prompts that it is given, and what a server answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from glm5.errors import EngineError
from glm5.rl.choices import Choices
from glm5.rl.rollout import Request, Rollout, Sampling

# A softmax in fp32 may exceed 1 by rounding.
_LOG_PROB_ROUNDING = 1e-6


@dataclass(frozen=True)
class Reply:
    """One completion as a server tells it, not believed yet: any JSON may stand in the fields."""

    token_ids: Any
    log_probs: Any
    finish: Any


def check_prompts(requests: Sequence[Request], vocab_size: int) -> None:
    """Raises EngineError: a prompt without tokens, or with one outside the vocabulary."""
    for request in requests:
        ids = request.prompt_ids
        if len(ids) == 0 or not 0 <= ids.min() <= ids.max() < vocab_size:
            raise EngineError(
                f"request {request.name}: no prompt for this model",
                got=f"{len(ids)} tokens" + (f", up to id {ids.max()}" if len(ids) else ""),
                expected=f"at least one token, ids in [0, {vocab_size})",
                remedy="use the tokenizer of the model that is trained",
            )


def check_reply(url: str, request: Request, reply: Reply, sampling: Sampling, vocab: int) -> None:
    """Raises EngineError unless the reply can be a completion of that request.

    Ids lie in the vocabulary, each has a log-probability that is finite and not positive, and the
    completion ends where it was to end: at a stop token and only there, or at the latest after
    max_new_tokens; a server may end it earlier where its context ends.
    """
    where = f"{url} answered request {request.name} with"
    tokens, log_probs = reply.token_ids, reply.log_probs
    if reply.finish not in ("stop", "length"):
        raise _malformed(f"{where} an end that is none", reply.finish, "stop or length")
    if not isinstance(tokens, list) or not tokens:
        raise _malformed(f"{where} no tokens", tokens, "a list of token ids")
    wrong = [token for token in tokens if not _is_int(token) or not 0 <= token < vocab]
    if wrong:
        raise _malformed(f"{where} tokens of another model", wrong[:5], f"ids in [0, {vocab})")
    _check_log_probs(where, log_probs, len(tokens))
    _check_end(where, tokens, reply.finish, sampling)


def checked_rollout(
    request: Request, reply: Reply, sampling: Sampling, choices: Choices | None, version: int
) -> Rollout:
    """The rollout of a reply that `check_reply` has let through."""
    return Rollout(
        request=request.name,
        prompt_ids=request.prompt_ids,
        response_ids=np.array(reply.token_ids, dtype=np.int32),
        log_probs=np.array(reply.log_probs, dtype=np.float32),
        finish="stop" if reply.token_ids[-1] in sampling.stop_token_ids else "length",
        choices=choices,
        adapter_version=version,
    )


def _check_log_probs(where: str, log_probs: Any, num_tokens: int) -> None:
    if not isinstance(log_probs, list) or len(log_probs) != num_tokens:
        got = len(log_probs) if isinstance(log_probs, list) else log_probs
        raise _malformed(
            f"{where} another number of log-probabilities than of tokens", got, num_tokens
        )
    for position, value in enumerate(log_probs):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or value > _LOG_PROB_ROUNDING:
            raise _malformed(
                f"{where} a log-probability that is none, of token {position}",
                value,
                "a finite number that is not positive",
            )


def _check_end(where: str, tokens: list[int], finish: str, sampling: Sampling) -> None:
    stops = [place for place, token in enumerate(tokens) if token in sampling.stop_token_ids]
    is_stopped = bool(stops) and stops[0] == len(tokens) - 1
    if len(tokens) > sampling.max_new_tokens or (stops and not is_stopped):
        raise _malformed(
            f"{where} tokens after the end",
            f"{len(tokens)} tokens, the first stop token at {stops[0] if stops else 'none'}",
            f"at most {sampling.max_new_tokens}, and none after a stop token",
        )
    if finish == "stop" and not is_stopped:
        raise EngineError(
            f"{where} a completion that stopped at another token than was asked",
            got=f"token {tokens[-1]}",
            expected=f"one of {list(sampling.stop_token_ids)}",
            remedy=f"add {tokens[-1]} to the stop tokens: the server ends there in any case",
        )


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _malformed(what: str, got: Any, expected: object) -> EngineError:
    return EngineError(
        what,
        got=str(got)[:200],
        expected=expected,
        remedy="compare the server's version with the one named in docs/rl.md",
    )
