"""Hands the weights that train to the engine, as a folder that it loads."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from megatron.core.models.gpt import GPTModel

from glm5.checkpoint.adapter_io import Consumer, write_peft_adapter, write_serving_adapter
from glm5.config import Glm5Config
from glm5.export.factors import AdapterPieces, adapter_pieces, join_adapter
from glm5.export.hf import exported_config, write_hf
from glm5.model.transformer_config import torch_dtype
from glm5.rl.first_rank import FirstRank
from glm5.rl.rollout import Engine
from glm5.rl.run_config import RlConfig

SYNC_FOLDER = "sync"
_CONSUMERS: dict[str, Consumer] = {"hf": "peft", "sglang": "sglang", "openai": "vllm"}


def consumer_of(engine: str) -> Consumer:
    """Whose form of an adapter folder an engine of `[rollout]` loads."""
    return _CONSUMERS[engine]


class WeightSync:
    """Writes version after version of the weights, and keeps the one that the engine has.

    A server that was started again reads its folder once more.
    """

    def __init__(
        self, run: RlConfig, chunks: Sequence[GPTModel], base: Path, first_rank: FirstRank
    ) -> None:
        """base: the Hugging Face folder that the run started from."""
        self._run = run
        self._chunks = chunks
        self._base = base
        self._first_rank = first_rank
        self._glm5: Glm5Config = chunks[0].config.glm5
        self._folder = run.output.dir / SYNC_FOLDER

    def clear(self) -> None:
        """Removes what an earlier process left; on the first rank."""
        if self._folder.exists():
            shutil.rmtree(self._folder)

    def hand_over(self, engine: Engine | None, version: int) -> None:
        """Writes the weights of now as `version`, and has the engine load them; collective.

        engine: on the first rank, and None elsewhere. Shapes and names are checked as in an export,
        logits are not: the gap of the next step says whether both sides compute the same.

        Raises:
            EngineError: the engine did not take them. AdapterError: a factor is not finite.
        """
        folder = self._folder / f"version-{version:08d}"
        if self._run.lora is None:
            self._first_rank.tell(lambda: self._hand_over_model(engine, folder, version))
        else:
            pieces = adapter_pieces(
                self._chunks, torch_dtype(self._run.model.dtype), torch.device("cpu")
            )
            ranks = self._first_rank.gather(pieces)
            self._first_rank.tell(lambda: self._hand_over_adapter(engine, ranks, folder, version))

    def _hand_over_model(self, engine: Engine | None, folder: Path, version: int) -> None:
        assert engine is not None
        (model,) = self._chunks
        glm5 = exported_config(self._glm5, self._run.model.dtype, include_mtp=False)
        write_hf(model, glm5, self._base, folder, include_mtp=False)
        engine.load_model(folder, version)
        self._drop_all_but(folder)

    def _hand_over_adapter(
        self, engine: Engine | None, ranks: Sequence[AdapterPieces], folder: Path, version: int
    ) -> None:
        assert engine is not None
        adapter = join_adapter(ranks)
        consumer = consumer_of(self._run.rollout.engine)
        base = self._run.model.path
        if consumer == "peft":
            write_peft_adapter(folder, adapter, config=self._glm5, base_name=base)
        else:
            write_serving_adapter(folder, adapter, consumer, config=self._glm5, base_name=base)
        engine.load_adapter(folder, version)
        self._drop_all_but(folder)

    def _drop_all_but(self, kept: Path) -> None:
        for folder in self._folder.iterdir():
            if folder != kept:
                shutil.rmtree(folder)
