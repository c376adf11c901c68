"""A server that speaks vLLM's part of OpenAI's protocol over the tiny model of transformers."""

from __future__ import annotations

from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from fastapi import Body, FastAPI
from starlette.responses import JSONResponse, Response

from glm5.rl.engines.hf import HfEngine
from glm5.rl.rollout import Request, Sampling
from tests.rl.engines.serving import Faults

MODEL = "tiny"


class FakeVllm:
    """State of one server process, and its routes."""

    def __init__(self, engine: HfEngine, base: Path) -> None:
        self.engine, self.base = engine, base
        self._lock, self._active = Lock(), MODEL
        self.reset()

    def reset(self) -> None:
        """As new, for the next test."""
        self.bodies: list[dict[str, Any]] = []
        self.faults = Faults()
        self.restart()

    def restart(self) -> None:
        """As a new process: no adapters."""
        self.adapters: dict[str, str] = {}
        with self._lock:
            self._activate(MODEL)

    def app(self) -> FastAPI:
        app = FastAPI()
        app.get("/v1/models")(lambda: {"data": [{"id": MODEL}]})
        app.post("/v1/completions")(self._completions)
        app.post("/v1/load_lora_adapter")(self._load)
        app.post("/v1/unload_lora_adapter")(self._unload)
        return app

    def _load(self, body: dict[str, Any] = Body()) -> Response:  # noqa: B008
        def right() -> JSONResponse:
            if not Path(body["lora_path"], "adapter_config.json").is_file():
                return JSONResponse({"error": {"message": "No adapter found"}}, 404)
            self.adapters[body["lora_name"]] = body["lora_path"]
            return JSONResponse("Success: LoRA adapter added successfully.")

        return self.faults.answer("load", right)

    def _unload(self, body: dict[str, Any] = Body()) -> Response:  # noqa: B008
        self.adapters.pop(body["lora_name"])
        return JSONResponse("Success: LoRA adapter removed successfully.")

    def _completions(self, body: dict[str, Any] = Body()) -> Response:  # noqa: B008
        self.bodies.append(body)
        return self.faults.answer("completions", lambda: self._complete(body))

    def _complete(self, body: dict[str, Any]) -> JSONResponse:
        if body["model"] != MODEL and body["model"] not in self.adapters:
            message = f"The model `{body['model']}` does not exist."
            return JSONResponse({"error": {"message": message}}, 404)
        stops = tuple(body["stop_token_ids"])
        sampling = Sampling(body["temperature"], body["top_p"], body["max_tokens"], stops, 0)
        request = Request("served", np.array(body["prompt"], np.int32), body["seed"])
        with self._lock:
            self._activate(body["model"])
            (completion,) = self.engine.complete([request], sampling, record="none")
        choice: dict[str, Any] = {
            "index": 0,
            "text": "",
            "finish_reason": "stop" if completion.tokens[-1] in stops else "length",
            "logprobs": {"token_logprobs": completion.log_probs, "tokens": [""]},
        }
        if body.get("return_token_ids"):
            choice |= {"token_ids": completion.tokens, "prompt_token_ids": body["prompt"]}
        return JSONResponse({"choices": [choice]})

    def _activate(self, model: str) -> None:
        if model == self._active:
            return
        if model == MODEL:
            self.engine.load_model(self.base, 0)
        else:
            self.engine.load_adapter(Path(self.adapters[model]), 0)
        self._active = model
