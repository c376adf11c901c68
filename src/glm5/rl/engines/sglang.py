"""Samples with a running SGLang server."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from glm5.config import Glm5Config
from glm5.errors import EngineError
from glm5.rl.engines.checks import check_prompts, check_reply, checked_rollout
from glm5.rl.engines.http import Answer, HttpOptions, Server
from glm5.rl.engines.records import pack_choices
from glm5.rl.engines.served_adapter import ServedAdapter
from glm5.rl.engines.sglang_info import FLAGS, read_server_args
from glm5.rl.engines.sglang_wire import (
    decode_experts,
    decode_topk,
    generate_body,
    meta_info,
    parse_reply,
    says_adapter_unknown,
)
from glm5.rl.products import Products
from glm5.rl.recorded import STREAMS, Recorded
from glm5.rl.rollout import Request, Rollout, Sampling


@dataclass(frozen=True)
class _Weights:
    """Of full training. stamp: as the server names them in every answer; loads: how often."""

    stamp: str
    folder: Path
    loads: int


class SglangEngine:
    """An `Engine` that asks an SGLang server, which others start and stop.

    The server reads adapters (`glm5 export --as adapter --for sglang`) and weights itself: their
    folders must lie where it sees them under the same path. A server that was started again gets
    its adapter, or the weights of full training, once more; what it sampled without is thrown away.
    Its caches need no flush: a new adapter has a new name, and new weights flush them.
    Completions repeat only on a server with --enable-deterministic-inference.
    """

    def __init__(
        self,
        url: str,
        glm5: Glm5Config,
        *,
        record: Recorded,
        lora: bool,
        options: HttpOptions | None = None,
    ) -> None:
        """Asks how the server was started. record, lora: what will be asked of it later.

        Raises:
            EngineError: it does not answer, or lacks a flag.
        """
        self._glm5 = glm5
        self._server = Server(url, options or HttpOptions())
        self._args = read_server_args(self._server)
        self._args.require_record(record)
        if lora:
            self._args.require("enable_lora")
        self._adapter = ServedAdapter(
            self._server, "", f"a server started with {FLAGS['enable_lora']}"
        )
        self._weights: _Weights | None = None
        self._run, self._lock, self._version = uuid.uuid4().hex[:8], Lock(), 0

    @property
    def can_record(self) -> bool:
        return self._args.can_record

    @property
    def products(self) -> Products:
        return self._args.products

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, *, record: Recorded
    ) -> list[Rollout]:
        check_prompts(requests, self._glm5.vocab_size)
        self._args.require_record(record)

        def work(request: Request) -> Rollout:
            answer = self._ask(request, sampling, record)
            return self._rollout(request, sampling, record, answer)

        return self._server.map(work, requests)

    def load_adapter(self, folder: Path, version: int) -> None:
        self._args.require("enable_lora")
        self._adapter.load(folder, version)
        self._version = version

    def load_model(self, folder: Path, version: int) -> None:
        self._adapter.drop()
        self._weights = _Weights(f"glm5-{self._run}-v{version}", folder.resolve(), 1)
        self._load_weights(self._weights)
        self._version = version

    def sleep(self) -> None:
        """Frees what a server with --enable-memory-saver can: without it, nothing.

        The weights go only where the server keeps a copy of them (--enable-weights-cpu-backup):
        otherwise it would come back without any.
        """
        self._move_memory("release")

    def wake(self) -> None:
        self._move_memory("resume")

    def close(self) -> None:
        self._adapter.leave()
        self._server.close()

    def _ask(self, request: Request, sampling: Sampling, record: Recorded) -> Answer:
        """An answer of the weights that are current, of a server that may have lost them once."""
        answer, restore = self._try(request, sampling, record)
        if restore is not None:
            restore()
            answer, restore = self._try(request, sampling, record)
        if restore is not None or not answer.is_ok:
            raise EngineError(
                f"{self._server.url} refused request {request.name}",
                got=answer.said(),
                expected="a completion by the weights that were loaded last",
                remedy="look at the server's log",
            )
        return answer

    def _try(
        self, request: Request, sampling: Sampling, record: Recorded
    ) -> tuple[Answer, Callable[[], None] | None]:
        """An answer, and what brings back what the server has lost, if it has."""
        served, weights = self._adapter.served, self._weights
        body = generate_body(
            request,
            sampling,
            record,
            lora_name=None if served is None else served.name,
            is_seeded=self._args.is_on("enable_deterministic_inference"),
        )
        answer = self._server.post("/generate", body)
        if served is not None and not answer.is_ok and says_adapter_unknown(answer.text):
            return answer, lambda: self._adapter.restore(served)
        if weights is not None and answer.is_ok and _weight_version(answer) != weights.stamp:
            return answer, lambda: self._restore_weights(weights)
        return answer, None

    def _rollout(
        self, request: Request, sampling: Sampling, record: Recorded, answer: Answer
    ) -> Rollout:
        url = self._server.url
        meta = meta_info(url, request, answer.json)
        reply = parse_reply(url, request, answer.json, meta)
        check_reply(url, request, reply, sampling, self._glm5.vocab_size)
        num_queries = len(request.prompt_ids) + len(reply.token_ids) - 1
        experts = keys = None
        if "experts" in STREAMS[record]:
            experts = decode_experts(meta, request, num_queries, self._glm5)
        if "topk" in STREAMS[record]:
            keys = decode_topk(meta, request, num_queries, self._glm5)
        choices = pack_choices(request.name, experts, keys, self._glm5)
        return checked_rollout(request, reply, sampling, choices, self._version)

    def _load_weights(self, weights: _Weights) -> None:
        answer = self._server.post(
            "/update_weights_from_disk",
            {
                "model_path": str(weights.folder),
                "weight_version": weights.stamp,
                "flush_cache": True,
            },
        )
        if not answer.is_ok:
            raise EngineError(
                f"{self._server.url} did not take the weights of {weights.folder}",
                got=answer.said(),
                expected="a checkpoint folder that the server can read at that path",
                remedy="put it where the server sees it, and look at the server's log",
            )

    def _restore_weights(self, seen: _Weights) -> None:
        """Once for all requests that found other weights."""
        with self._lock:
            if self._weights == seen:
                self._load_weights(seen)
                self._weights = _Weights(seen.stamp, seen.folder, seen.loads + 1)

    def _move_memory(self, verb: str) -> None:
        if not self._args.is_on("enable_memory_saver"):
            return
        tags = ["kv_cache"]
        if self._args.is_on("enable_weights_cpu_backup"):
            tags.append("weights")
        answer = self._server.post(f"/{verb}_memory_occupation", {"tags": tags})
        if not answer.is_ok:
            raise EngineError(
                f"{self._server.url} did not {verb} its memory",
                got=answer.said(),
                remedy="look at the server's log",
            )


def _weight_version(answer: Answer) -> Any:
    meta = answer.json.get("meta_info") if isinstance(answer.json, dict) else None
    return meta.get("weight_version") if isinstance(meta, dict) else None
