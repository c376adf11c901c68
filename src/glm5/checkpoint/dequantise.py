"""Checkpoints as `transformers` can read them: it cannot dequantise FP8 with ragged blocks."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from glm5.checkpoint.block_scaled import read_block_scaled
from glm5.checkpoint.fp8 import open_checkpoint
from glm5.checkpoint.hf_files import add_small_files
from glm5.checkpoint.hf_layout import hf_tensors
from glm5.checkpoint.safetensors_io import TensorReader
from glm5.checkpoint.safetensors_writer import SafetensorsWriter
from glm5.config import Glm5Config


@contextmanager
def readable_by_transformers(folder: Path, glm5: Glm5Config) -> Iterator[Path]:
    """The folder itself, or for an FP8 checkpoint a temporary copy in the config's dtype."""
    if glm5.fp8 is None:
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="glm5-dequantised-") as temporary:
        copy = Path(temporary) / "hf"
        rewrite_checkpoint(folder, copy, glm5)
        yield copy


@contextmanager
def as_float8_base(folder: Path, glm5: Glm5Config) -> Iterator[Path]:
    """A temporary copy of what a model on frozen float8 weights computes with.

    Linears of an FP8 release are value times scale in fp32: of the folder's own float8 values, or
    of those that its weights are quantised to.
    """
    layout = hf_tensors(glm5)
    with (
        tempfile.TemporaryDirectory(prefix="glm5-float8-") as temporary,
        open_checkpoint(folder, glm5) as reader,
    ):
        plan = {
            name: (shape, torch.float32 if layout[name].quantisable else dtype)
            for name, (shape, dtype) in tensor_plan(reader).items()
        }
        copy = Path(temporary) / "hf"
        with SafetensorsWriter(copy, plan) as writer:
            for name in plan:
                if layout[name].quantisable:
                    weight = read_block_scaled(reader, name, None, torch.device("cpu"))
                    writer.add(name, weight.dequantise(torch.float32))
                else:
                    writer.add(name, reader.read(name))
            add_small_files(writer, folder, glm5.model_copy(update={"fp8": None}))
        yield copy


def rewrite_checkpoint(
    source: Path,
    target: Path,
    glm5: Glm5Config,
    change: Callable[[str, Tensor], Tensor] = lambda name, tensor: tensor,
) -> None:
    """Writes `source` anew, dequantised, through `change`, which keeps shape and dtype.

    The folder appears complete or not at all; one tensor is in memory at a time.
    """
    plain = glm5.model_copy(update={"fp8": None})
    with (
        open_checkpoint(source, glm5) as reader,
        SafetensorsWriter(target, tensor_plan(reader)) as writer,
    ):
        for name in reader.names():
            writer.add(name, change(name, reader.read(name)))
        add_small_files(writer, source, plain)


def tensor_plan(reader: TensorReader) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of everything a reader holds, for a writer."""
    return {name: (reader.shape(name), reader.dtype(name)) for name in reader.names()}
