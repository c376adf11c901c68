"""A server that speaks SGLang's protocol over the tiny model of transformers.

Written from what SGLang documents and answers; it shares no code with the client. Adapters are PEFT
folders here, because `transformers` loads them.
"""

from __future__ import annotations

import base64
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from fastapi import Body, FastAPI
from starlette.responses import JSONResponse, Response

from glm5.config import Glm5Config
from glm5.rl.engines.hf import HfEngine
from glm5.rl.engines.hf_generate import Completion
from glm5.rl.rollout import Request, Sampling
from tests.rl.engines.serving import Faults

ALL_FLAGS = {
    "enable_lora": True,
    "enable_return_routed_experts": True,
    "enable_return_indexer_topk": True,
    "enable_memory_saver": True,
    "enable_weights_cpu_backup": False,
    "enable_deterministic_inference": True,
}


class FakeSglang:
    """State of one server process, and its routes."""

    def __init__(self, engine: HfEngine, base: Path, glm5: Glm5Config) -> None:
        self.engine, self.base, self.glm5 = engine, base, glm5
        self._lock = Lock()
        self._weights, self._active = base, None
        self.reset()

    def reset(self) -> None:
        """As new, for the next test."""
        self.flags: dict[str, Any] = dict(ALL_FLAGS)
        self.experts_dtype: str | None = None
        self.names_layers = False
        self.extra_eos: tuple[int, ...] = ()
        self.bodies: list[tuple[str, dict[str, Any]]] = []
        self.faults = Faults()
        self.restart()

    def restart(self) -> None:
        """As a new process: the base it was started on, no adapters."""
        self.adapters: dict[str, str] = {}
        self.weight_version = "default"
        with self._lock:
            if self._active is not None or self._weights != self.base:
                self.engine.load_model(self.base, 0)
            self._weights, self._active = self.base, None

    def app(self) -> FastAPI:
        app = FastAPI()
        app.get("/health")(self._health)
        app.get("/server_info")(lambda: self._route("/server_info", lambda: self._ok(self.flags)))
        for path in (
            "/generate",
            "/load_lora_adapter",
            "/unload_lora_adapter",
            "/update_weights_from_disk",
            "/release_memory_occupation",
            "/resume_memory_occupation",
        ):
            app.post(path)(self._handler(path))
        return app

    def _health(self) -> Response:
        return Response()

    def _handler(self, path: str) -> Any:
        work = getattr(self, "_" + path.strip("/"))

        def handle(body: dict[str, Any] = Body()) -> Response:  # noqa: B008
            self.bodies.append((path, body))
            return self._route(path, lambda: work(body))

        return handle

    def _route(self, path: str, right: Any) -> Response:
        return self.faults.answer(path, right)

    def _ok(self, content: Any) -> JSONResponse:
        return JSONResponse(content)

    def _bad(self, message: str) -> JSONResponse:
        return JSONResponse({"error": {"message": message}}, 400)

    def _load_lora_adapter(self, body: dict[str, Any]) -> JSONResponse:
        name, path = body["lora_name"], body["lora_path"]
        if name in self.adapters:
            return self._bad(f"LoRA adapter {name} is already loaded")
        if not Path(path, "adapter_config.json").is_file():
            return self._bad(f"no adapter at {path}")
        self.adapters[name] = path
        return self._ok({"success": True, "loaded_adapters": self.adapters})

    def _unload_lora_adapter(self, body: dict[str, Any]) -> JSONResponse:
        if self.adapters.pop(body["lora_name"], None) is None:
            return self._bad(f"LoRA adapter {body['lora_name']} is not loaded")
        return self._ok({"success": True})

    def _update_weights_from_disk(self, body: dict[str, Any]) -> JSONResponse:
        if not Path(body["model_path"], "config.json").is_file():
            return JSONResponse({"success": False, "message": "no weights there"}, 400)
        with self._lock:
            self.engine.load_model(Path(body["model_path"]), 0)
            self._weights, self._active = Path(body["model_path"]), None
        self.weight_version = body["weight_version"]
        return self._ok({"success": True})

    def _release_memory_occupation(self, body: dict[str, Any]) -> JSONResponse:
        return self._ok(None)

    def _resume_memory_occupation(self, body: dict[str, Any]) -> JSONResponse:
        return self._ok(None)

    def _generate(self, body: dict[str, Any]) -> JSONResponse:
        lora = body.get("lora_path")
        if lora is not None and lora not in self.adapters:
            return self._bad(f"Got LoRA adapter that has never been loaded: {lora}")
        params = body["sampling_params"]
        stops = () if params["ignore_eos"] else (*params["stop_token_ids"], *self.extra_eos)
        sampling = Sampling(
            params["temperature"], params["top_p"], params["max_new_tokens"], stops, 0
        )
        prompt = np.array(body["input_ids"], np.int32)
        request = Request("served", prompt, params.get("sampling_seed", 1))
        with self._lock:
            self._activate(lora)
            (completion,) = self.engine.complete([request], sampling, record="both")
        return self._ok(self._answer(completion, sampling, body))

    def _activate(self, lora: str | None) -> None:
        if lora == self._active:
            return
        if lora is None:
            self.engine.load_model(self._weights, 0)
        else:
            self.engine.load_adapter(Path(self.adapters[lora]), 0)
        self._active = lora

    def _answer(
        self, completion: Completion, sampling: Sampling, body: dict[str, Any]
    ) -> dict[str, Any]:
        last = completion.tokens[-1]
        if last in sampling.stop_token_ids:
            reason: dict[str, Any] = {"type": "stop", "matched": last}
        else:
            reason = {"type": "length", "length": len(completion.tokens)}
        pairs = zip(completion.log_probs, completion.tokens, strict=True)
        meta: dict[str, Any] = {
            "id": "0",
            "finish_reason": reason,
            "weight_version": self.weight_version,
            "output_token_logprobs": [[log_prob, token, None] for log_prob, token in pairs],
        }
        if body["return_routed_experts"] and self.flags["enable_return_routed_experts"]:
            meta |= self._experts(np.concatenate(completion.experts))
        if body["return_indexer_topk"] and self.flags["enable_return_indexer_topk"]:
            meta |= self._topk(np.concatenate(completion.keys))
        return {"text": "", "output_ids": completion.tokens, "meta_info": meta}

    def _experts(self, sparse: Any) -> dict[str, Any]:
        """Of all layers; dense ones hold zeros."""
        shape = (len(sparse), self.glm5.num_hidden_layers, self.glm5.num_experts_per_tok)
        experts = np.zeros(shape, np.int32)
        experts[:, [kind == "sparse" for kind in self.glm5.mlp_layer_types]] = sparse
        if self.experts_dtype is None:
            return {"routed_experts": encode(experts)}
        encoded = encode(experts.astype(self.experts_dtype))
        return {"routed_experts": encoded, "routed_experts_dtype": self.experts_dtype}

    def _topk(self, full: Any) -> dict[str, Any]:
        """Of all layers; shared ones hold the keys that they reuse."""
        sources = np.cumsum([kind == "full" for kind in self.glm5.indexer_types]) - 1
        meta: dict[str, Any] = {"indexer_topk": encode(full[:, sources])}
        if self.names_layers:
            meta["indexer_topk_num_layers"] = self.glm5.num_hidden_layers
        return meta


def encode(array: Any) -> str:
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
