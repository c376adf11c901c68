"""Samples with any server of OpenAI's completions that tells token ids: vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from glm5.config import Glm5Config
from glm5.errors import EngineError
from glm5.rl.engines.checks import Reply, check_prompts, check_reply, checked_rollout
from glm5.rl.engines.http import Answer, HttpOptions, Server
from glm5.rl.engines.params import shape_params
from glm5.rl.engines.served_adapter import ServedAdapter
from glm5.rl.products import Products, serves_fp8
from glm5.rl.recorded import Recorded
from glm5.rl.rollout import Request, Rollout, Sampling

LogProbs = Literal["raw", "processed"]

_LORA_REMEDY = (
    "start vLLM with --enable-lora --max-lora-rank RANK and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"
)


class OpenAiEngine:
    """An `Engine` that asks a server of /v1/completions, which others start and stop.

    The prompt goes as token ids, and the drawn ids come back by `return_token_ids`, an extension of
    vLLM's: text is never tokenised again. No choices are recorded. Adapters
    (`glm5 export --as adapter --for vllm`) are loaded by vLLM's calls, from folders that the server
    sees under the same path; a server that was started again gets its adapter once more.
    """

    can_record = False

    def __init__(
        self,
        url: str,
        model: str,
        glm5: Glm5Config,
        *,
        log_probs: LogProbs = "raw",
        options: HttpOptions | None = None,
    ) -> None:
        """model: the base, as the server names it. log_probs: vLLM's --logprobs-mode without
        "_logprobs"; raw ones are of the distribution at temperature 1, processed ones of what top_p
        left over, so each is right for some samplings only.

        Raises:
            EngineError: the server does not answer, or does not serve that model.
        """
        self._glm5, self._model, self._log_probs = glm5, model, log_probs
        self._server = Server(url, options or HttpOptions())
        self._adapter = ServedAdapter(self._server, "/v1", _LORA_REMEDY)
        self._version = 0
        self._products: Products = _products(self._find_model())

    @property
    def products(self) -> Products:
        return self._products

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, *, record: Recorded
    ) -> list[Rollout]:
        if record != "none":
            raise EngineError(
                "this engine cannot record choices",
                got=f"replay = {record}",
                expected="none",
                remedy="the engines hf and sglang can",
            )
        check_prompts(requests, self._glm5.vocab_size)
        self._check_sampling(sampling)

        def work(request: Request) -> Rollout:
            reply = self._reply(request, self._ask(request, sampling))
            check_reply(self._server.url, request, reply, sampling, self._glm5.vocab_size)
            return checked_rollout(request, reply, sampling, None, self._version)

        return self._server.map(work, requests)

    def load_adapter(self, folder: Path, version: int) -> None:
        self._adapter.load(folder, version)
        self._version = version

    def load_model(self, folder: Path, version: int) -> None:
        raise EngineError(
            "a server of OpenAI's completions cannot load other weights",
            got=folder,
            remedy="train with LoRA, or use the engine hf or sglang",
        )

    def sleep(self) -> None:
        """Frees nothing: the protocol has no call for it."""

    def wake(self) -> None:
        """Was never asleep."""

    def close(self) -> None:
        self._adapter.leave()
        self._server.close()

    def _find_model(self) -> dict[str, Any]:
        """What the server says of the model."""
        answer = self._server.get("/v1/models")
        cards = answer.json.get("data") if isinstance(answer.json, dict) else None
        listed = cards if isinstance(cards, list) else []
        found = [card for card in listed if isinstance(card, dict)]
        names = [card.get("id") for card in found]
        if self._model not in names:
            raise EngineError(
                f"{self._server.url} does not serve the model",
                got=names or answer.said(),
                expected=self._model,
                remedy="name one that it serves (vLLM: --served-model-name)",
            )
        return found[names.index(self._model)]

    def _check_sampling(self, sampling: Sampling) -> None:
        is_raw = self._log_probs == "raw"
        got, key = (sampling.temperature, "temperature") if is_raw else (sampling.top_p, "top_p")
        if got != 1:
            raise EngineError(
                f"{self._log_probs} log-probabilities are those of the draw only at {key} 1",
                got=f"{key} = {got}",
                remedy=f"{key} = 1, or the other --logprobs-mode of the server",
            )

    def _ask(self, request: Request, sampling: Sampling) -> Answer:
        served = self._adapter.served
        answer = self._post(request, sampling)
        if served is not None and answer.status == 404:
            # the server was started again, and knows the base alone
            self._adapter.restore(served)
            answer = self._post(request, sampling)
        if not answer.is_ok:
            raise EngineError(
                f"{self._server.url} refused request {request.name}",
                got=answer.said(),
                expected="a completion",
                remedy="look at the server's log",
            )
        return answer

    def _post(self, request: Request, sampling: Sampling) -> Answer:
        served = self._adapter.served
        body = {
            "model": self._model if served is None else served.name,
            "prompt": request.prompt_ids.tolist(),
            "max_tokens": sampling.max_new_tokens,
            **shape_params(sampling),
            "seed": request.seed,
            "stop_token_ids": list(sampling.stop_token_ids),
            "ignore_eos": True,
            "logprobs": 1,
            "return_token_ids": True,
        }
        return self._server.post("/v1/completions", body)

    def _reply(self, request: Request, answer: Answer) -> Reply:
        choices = answer.json.get("choices") if isinstance(answer.json, dict) else None
        if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
            raise EngineError(
                f"{self._server.url} answered request {request.name} with no completion",
                got=answer.said(),
                expected="one entry in choices",
                remedy="is this a server of /v1/completions?",
            )
        choice: dict[str, Any] = choices[0]
        self._check_ids(request, choice)
        log_probs = choice.get("logprobs")
        return Reply(
            token_ids=choice["token_ids"],
            log_probs=log_probs.get("token_logprobs") if isinstance(log_probs, dict) else None,
            finish=choice.get("finish_reason"),
        )

    def _check_ids(self, request: Request, choice: dict[str, Any]) -> None:
        if choice.get("token_ids") is None:
            raise EngineError(
                f"{self._server.url} does not tell the token ids of request {request.name}",
                got=sorted(choice),
                expected="token_ids, asked for by return_token_ids",
                remedy="vLLM >= 0.10.2; text alone does not say which tokens were drawn",
            )
        echoed = choice.get("prompt_token_ids")
        if echoed is not None and echoed != request.prompt_ids.tolist():
            raise EngineError(
                f"{self._server.url} changed the prompt of request {request.name}",
                got=f"{len(echoed)} tokens",
                expected=f"the {len(request.prompt_ids)} that were sent",
                remedy="a server that adds no tokens and truncates no prompt",
            )


def _products(card: Mapping[str, Any]) -> Products:
    """vLLM tells the folder that it serves, but not whether it quantises that itself."""
    return "fp8" if serves_fp8(card.get("root")) else "untold"
