"""Samples with `transformers` in this process: no server, every number can be looked at."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from glm5.checkpoint.adapter_io import attach_adapter, check_loaded_tensors, detach_adapter
from glm5.checkpoint.dequantise import as_float8_base, readable_by_transformers
from glm5.checkpoint.hf_model import load_hf_model
from glm5.config import Glm5Config
from glm5.errors import ConfigError, EngineError, Glm5Error
from glm5.model.transformer_config import BaseWeights
from glm5.rl.engines.checks import check_prompts
from glm5.rl.engines.fp8_activations import quantise_activations
from glm5.rl.engines.hf_generate import Completion, complete
from glm5.rl.engines.hf_record import HfRecorder, Record
from glm5.rl.engines.records import pack_choices
from glm5.rl.products import Products
from glm5.rl.recorded import Recorded
from glm5.rl.rollout import Request, Rollout, Sampling


class HfEngine:
    """An `Engine` on the weights of a Hugging Face folder, with `glm5.latent_norm_eps`.

    Adapters are PEFT folders (`glm5 export --as adapter --for peft`). A request's tokens follow
    from its own seed: the batch that it is computed in changes log-probabilities by rounding only.
    """

    can_record = True

    def __init__(
        self,
        folder: Path,
        glm5: Glm5Config,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        *,
        max_batch: int = 64,
        base_weights: BaseWeights = "dtype",
        fp8_activations: bool = False,
    ) -> None:
        """Loads the folder; at most `max_batch` requests are computed together.

        base_weights: as the trainer has them; with "fp8" the linears of an FP8 release are what
        float8 and scales stand for, of the folder's own or of what it is quantised to.
        fp8_activations: linears of an FP8 checkpoint multiply as in an engine that serves it, see
        quantise_activations, with the weights that float8 and scales stand for; else with these in
        the checkpoint's dtype.

        Raises:
            ConfigError, CheckpointError: transformers is too old, or cannot load the folder; or
            float8 is asked of a checkpoint that has none.
        """
        if fp8_activations and glm5.fp8 is None:
            raise ConfigError(
                "rollout.fp8_activations is for FP8 checkpoints",
                got=f"{folder}, whose config.json has no quantization_config",
                remedy="leave it out, or give the FP8 release as model.path",
            )
        self._base_weights, self._fp8_activations = base_weights, fp8_activations
        self._glm5, self._device, self._dtype = glm5, device, dtype
        self._max_batch = max_batch
        self._peft: Any = None
        self._version = 0
        self._base = self._load(folder)

    @property
    def products(self) -> Products:
        return "fp8" if self._fp8_activations else "exact"

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, *, record: Recorded
    ) -> list[Rollout]:
        # packed batch by batch: as they come, the records of all requests may not fit
        done = self._batches(requests, sampling, record)
        return [self._rollout(completion, sampling) for batch in done for completion in batch]

    def complete(
        self, requests: Sequence[Request], sampling: Sampling, *, record: Recorded
    ) -> list[Completion]:
        """As `generate`, but with the records as they came from the model."""
        return [c for batch in self._batches(requests, sampling, record) for c in batch]

    def load_adapter(self, folder: Path, version: int) -> None:
        self._detach()
        try:
            self._peft = attach_adapter(self._base, folder).to(self._device)
            check_loaded_tensors(self._peft, folder)
        except Glm5Error as error:
            # PEFT may have changed some of the model already
            self.close()
            raise EngineError(
                "the engine did not take the adapter",
                got=error,
                expected="a PEFT folder of this model",
                remedy="export it with --for peft; the engine needs load_model before it goes on",
            ) from error
        self._version = version

    def load_model(self, folder: Path, version: int) -> None:
        # the old weights go first: two models may not fit
        self._base = self._peft = None
        try:
            self._base = self._load(folder)
        except Glm5Error as error:
            raise EngineError("the engine did not take the weights", got=error) from error
        self._version = version

    def sleep(self) -> None:
        if self._device.type == "cuda" and self._base is not None:
            self._base.to("cpu")
            torch.cuda.empty_cache()

    def wake(self) -> None:
        if self._base is not None:
            self._base.to(self._device)

    def close(self) -> None:
        self._base = self._peft = None

    def _batches(
        self, requests: Sequence[Request], sampling: Sampling, record: Recorded
    ) -> Iterator[list[Completion]]:
        check_prompts(requests, self._glm5.vocab_size)
        model = self._model()
        for start in range(0, len(requests), self._max_batch):
            batch = requests[start : start + self._max_batch]
            yield complete(model, batch, sampling, HfRecorder(self._glm5, record))

    def _load(self, folder: Path) -> Any:
        if not self._fp8_activations:
            is_float8 = self._base_weights == "fp8"
            copied = as_float8_base if is_float8 else readable_by_transformers
            with copied(folder, self._glm5) as readable:
                return load_hf_model(readable, self._glm5, self._dtype).to(self._device)
        # dequantised to the dtype that it computes in: nothing is rounded before that
        source = self._glm5.in_dtype(str(self._dtype).removeprefix("torch."))
        with readable_by_transformers(folder, source) as readable:
            model = load_hf_model(readable, self._glm5, self._dtype).to(self._device)
        quantise_activations(model, self._glm5)
        return model

    def _detach(self) -> None:
        if self._peft is not None:
            self._base, self._peft = detach_adapter(self._peft), None

    def _model(self) -> Any:
        """PEFT's layers, if any, lie inside the base."""
        if self._base is None:
            raise EngineError(
                "the engine holds no model",
                got="the last load failed, or the engine is closed",
                remedy="load_model first",
            )
        return self._base

    def _rollout(self, completion: Completion, sampling: Sampling) -> Rollout:
        request = completion.request
        if not all(map(math.isfinite, completion.log_probs)):
            raise EngineError(
                f"request {request.name}: the model computes log-probabilities that are no numbers",
                got=f"version {self._version} of the weights",
                expected="finite logits",
                remedy="look at the training that made these weights",
            )
        choices = pack_choices(
            request.name, _join(completion.experts), _join(completion.keys), self._glm5
        )
        return Rollout(
            request=request.name,
            prompt_ids=request.prompt_ids,
            response_ids=np.array(completion.tokens, dtype=np.int32),
            log_probs=np.array(completion.log_probs, dtype=np.float32),
            finish="stop" if completion.tokens[-1] in sampling.stop_token_ids else "length",
            choices=choices,
            adapter_version=self._version,
        )


def _join(pieces: list[Record]) -> Record | None:
    """[tokens - 1, layers, k], None where nothing was recorded."""
    return np.concatenate(pieces) if pieces else None
