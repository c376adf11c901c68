"""Builds what a run trains: the rank's stages of the model, their optimizer and schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from megatron.core.models.gpt import GPTModel

from glm5.checkpoint.load import load_chunks
from glm5.checkpoint.trained import adapt
from glm5.config import Glm5Config
from glm5.model.layout import check_layout
from glm5.model.schedule import pipeline_layout
from glm5.model.transformer_config import DEFAULT_FP8_TRANSIENT_MIB
from glm5.runtime.distributed import Layout
from glm5.train.optimizer import build_optimizer, build_scheduler, wrap_data_parallel
from glm5.train.resume import lora_record
from glm5.train.run_file import RunFile
from glm5.train.state import TrainState


def check_splits(run: RunFile, folder: Path) -> None:
    """Tells a wrong `[layout]` before data are tokenised or weights read.

    Raises:
        LayoutError: the model cannot be split so.
    """
    glm5, layout = Glm5Config.from_hf(folder), parallel_layout(run)
    check_layout(glm5, layout)
    stages = layout.pp * layout.vpp
    pipeline_layout(glm5, stages, run.layout.layers_per_stage, mtp=run.model.mtp)


def build_trainable(
    run: RunFile,
    folder: Path,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[GPTModel]:
    """This rank's stages of the model of the run, with adapters attached when it has them."""
    chunks = load_chunks(
        folder,
        progress=progress,
        backend=run.model.attention_backend,
        dtype=run.model.dtype,
        deterministic_attention=run.model.deterministic_attention,
        recompute=run.model.recompute,
        include_mtp=run.model.mtp,
        indexer_loss_coeff=run.indexer_loss_coeff,
        latent_norm_eps=run.model.latent_norm_eps,
        layers_per_stage=run.layout.layers_per_stage,
        attention_parallel=run.layout.attention_parallel,
        base_weights=run.model.base_weights,
        fp8_compute=run.model.fp8_compute,
        fp8_transient_mib=run.model.fp8_transient_mib or DEFAULT_FP8_TRANSIENT_MIB,
    )
    if run.lora is not None:
        adapt(chunks, lora_record(run.lora), seed=run.train.seed)
    return [chunk.train() for chunk in chunks]


def describe_model(chunks: Sequence[GPTModel]) -> str:
    """One line on what trains."""
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    total = sum(parameter.numel() for parameter in parameters)
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    device = parameters[0].device
    return f"model: {total:,} parameters, {trained:,} of them train, on {device}"


def parallel_layout(run: RunFile) -> Layout:
    """The sizes of the `[layout]` table."""
    sizes = run.layout
    return Layout(tp=sizes.tp, pp=sizes.pp, vpp=sizes.vpp, cp=sizes.cp, ep=sizes.ep, etp=sizes.etp)


def build_state(run: RunFile, chunks: Sequence[GPTModel]) -> TrainState:
    """The stages with gradient buffers, an optimizer and its schedule."""
    wrapped = wrap_data_parallel(chunks)
    optimizer = build_optimizer(wrapped, run.optimizer)
    return TrainState(
        wrapped, optimizer, build_scheduler(optimizer, run.optimizer, run.num_updates)
    )
