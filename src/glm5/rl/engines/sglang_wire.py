"""SGLang's JSON: what a request says, and what its answer means.

Read in sgl-project/sglang in 2026 (`managers/io_struct.py`, `managers/tokenizer_manager.py`,
`sampling/sampling_params.py`, `state_capturer/`), and nothing was copied:

* `meta_info.output_token_logprobs` holds [log-probability, token id, text or null] of every token
  drawn, the stop token too. The log-probability is that of softmax(logits / temperature) before
  top_p, unless the server's environment sets SGLANG_RETURN_ORIGINAL_LOGPROB.
* `finish_reason` is {"type": "stop" | "length" | "abort", "matched": token id or text}. Where the
  logits are NaN it is a stop that matched the text "NaN happened".
* `ignore_eos` switches off stop_token_ids, too. Without it the server also ends at the model's own
  end tokens.
* `routed_experts` and `indexer_topk` are base64 of C-order [tokens - 1, layers, k]. The layers are
  all decoder layers: dense ones hold no experts, and shared ones the keys that they reuse. Newer
  servers may send experts in fewer bits, named by `routed_experts_dtype`; some name the layers of
  the second one in `indexer_topk_num_layers`.
* `sampling_seed` has an effect only with --enable-deterministic-inference.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from glm5.config import Glm5Config
from glm5.errors import EngineError, ReplayError
from glm5.rl.engines.checks import Reply
from glm5.rl.engines.params import shape_params
from glm5.rl.recorded import STREAMS, Recorded
from glm5.rl.rollout import Request, Sampling

_DTYPES = {"int32": "<i4", "uint16": "<u2", "uint8": "<u1"}
_UNKNOWN_ADAPTER = "lora adapter that has never been loaded"


def generate_body(
    request: Request,
    sampling: Sampling,
    recorded: Recorded,
    *,
    lora_name: str | None,
    is_seeded: bool,
) -> dict[str, Any]:
    """The body of /generate."""
    params: dict[str, Any] = {
        **shape_params(sampling),
        "max_new_tokens": sampling.max_new_tokens,
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": not sampling.stop_token_ids,
    }
    if is_seeded:
        params["sampling_seed"] = request.seed
    body: dict[str, Any] = {
        "input_ids": request.prompt_ids.tolist(),
        "sampling_params": params,
        "return_logprob": True,
        "return_routed_experts": "experts" in STREAMS[recorded],
        "return_indexer_topk": "topk" in STREAMS[recorded],
    }
    return body if lora_name is None else body | {"lora_path": lora_name}


def says_adapter_unknown(text: str) -> bool:
    """Of the body of an answer to /generate: the server was started again, and forgot it."""
    return _UNKNOWN_ADAPTER in text.lower()


def meta_info(url: str, request: Request, json: Any) -> Mapping[str, Any]:
    """Raises EngineError: the answer has none, or its request was aborted."""
    meta = json.get("meta_info") if isinstance(json, dict) else None
    if not isinstance(meta, dict) or not isinstance(meta.get("finish_reason"), dict):
        raise EngineError(
            f"{url} answered request {request.name} with something else than a completion",
            got=str(json)[:200],
            expected="meta_info with finish_reason",
            remedy="is this an SGLang server?",
        )
    reason = meta["finish_reason"]
    if reason.get("type") == "abort" or isinstance(reason.get("matched"), str):
        raise EngineError(
            f"{url} broke request {request.name} off",
            got=str(reason.get("message") or reason)[:300],
            expected="a completion",
            remedy="look at the server's log",
        )
    return meta


def parse_reply(url: str, request: Request, json: Any, meta: Mapping[str, Any]) -> Reply:
    """The drawn tokens of an answer.

    Raises:
        EngineError: tokens and log-probabilities do not come in pairs, or not for every token.
    """
    pairs = meta.get("output_token_logprobs")
    if not isinstance(pairs, list) or not all(_is_pair(item) for item in pairs):
        raise _unpaired(url, request, str(pairs)[:200])
    token_ids = [item[1] for item in pairs]
    # some releases leave the stop token out of output_ids
    told = json.get("output_ids")
    if isinstance(told, list) and told != token_ids[: len(told)]:
        raise _unpaired(url, request, f"{len(pairs)} of them, and {len(told)} output_ids")
    return Reply(token_ids, [item[0] for item in pairs], meta["finish_reason"].get("type"))


def decode_experts(
    meta: Mapping[str, Any], request: Request, num_queries: int, glm5: Glm5Config
) -> NDArray[np.int32]:
    """[queries, layers, num_experts_per_tok] of `routed_experts`.

    Raises:
        EngineError: the answer has no record. ReplayError: it is no record of that many queries.
    """
    sparse = glm5.mlp_layer_types.count("sparse")
    flat = _buffer(meta, "routed_experts", request, _DTYPES)
    layers = {glm5.num_hidden_layers, sparse}
    return _shaped(flat, "routed_experts", request, num_queries, layers, glm5.num_experts_per_tok)


def decode_topk(
    meta: Mapping[str, Any], request: Request, num_queries: int, glm5: Glm5Config
) -> NDArray[np.int32]:
    """[queries, layers, index_topk] of `indexer_topk`, counted from the request's first token.

    Raises:
        EngineError: the answer has no record. ReplayError: it is no record of that many queries.
    """
    flat = _buffer(meta, "indexer_topk", request, {"int32": "<i4"})
    layers = {glm5.num_hidden_layers, glm5.indexer_types.count("full")}
    told = meta.get("indexer_topk_num_layers")
    if told is not None:
        layers &= {told} if isinstance(told, int) else set()
    return _shaped(flat, "indexer_topk", request, num_queries, layers, glm5.index_topk)


def _is_pair(item: Any) -> bool:
    return isinstance(item, list) and len(item) >= 2


def _unpaired(url: str, request: Request, got: str) -> EngineError:
    return EngineError(
        f"{url} answered request {request.name} with no log-probability for every token",
        got=got,
        expected="output_token_logprobs: [log-probability, token id, ...] of each of output_ids",
        remedy="compare the server's version with the one named in docs/rl.md",
    )


def _buffer(
    meta: Mapping[str, Any], name: str, request: Request, dtypes: Mapping[str, str]
) -> NDArray[np.int32]:
    text, dtype = meta.get(name), meta.get(f"{name}_dtype", "int32")
    if text is None:
        raise EngineError(
            f"the server recorded no {name} of request {request.name}",
            expected="a server that was started with --enable-return-" + name.replace("_", "-"),
            remedy="restart it with that flag, or set replay to none",
        )
    if dtype not in dtypes:
        raise _bad_record(name, request, f"dtype {dtype}", " | ".join(dtypes))
    try:
        content = base64.b64decode(text, validate=True)
    except (binascii.Error, TypeError, ValueError) as error:
        raise _bad_record(name, request, error, "base64") from error
    if len(content) % np.dtype(dtypes[dtype]).itemsize:
        raise _bad_record(name, request, f"{len(content)} bytes", f"whole numbers of {dtype}")
    return np.frombuffer(content, dtypes[dtype]).astype(np.int32, copy=False)


def _shaped(
    flat: NDArray[np.int32],
    name: str,
    request: Request,
    num_queries: int,
    layers: set[int],
    width: int,
) -> NDArray[np.int32]:
    for num_layers in layers:
        if flat.size == num_queries * num_layers * width:
            return flat.reshape(num_queries, num_layers, width)
    raise _bad_record(
        name,
        request,
        f"{flat.size} numbers",
        f"{num_queries} queries x {sorted(layers)} layers x {width}",
    )


def _bad_record(name: str, request: Request, got: object, expected: str) -> ReplayError:
    return ReplayError(
        f"the server's {name} of request {request.name} are no record of it",
        got=got,
        expected=expected,
        remedy="is it the same model, and a server whose version docs/rl.md names?",
    )
