"""`glm5 train`: from a run file to a trained checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from megatron.core.models.gpt import GPTModel

from glm5.checkpoint.adapter_start import check_adapter_folder, start_from_adapter
from glm5.checkpoint.atomic import remove_partials
from glm5.checkpoint.ckpt_dir import (
    STEPS_FOLDER,
    CheckpointRecord,
    LoraRecord,
    read_record,
    saved_steps,
    step_folder,
)
from glm5.checkpoint.fingerprint import (
    base_fingerprints,
    changed_inputs,
    files_fingerprint,
)
from glm5.checkpoint.hf_folder import hf_folder
from glm5.checkpoint.load import load_chunks
from glm5.checkpoint.trained import adapt
from glm5.config import Glm5Config
from glm5.errors import ConfigError, DataError
from glm5.runtime.distributed import Layout, default_device, ensure_distributed
from glm5.train.chat import ChatTokenizer, check_fits_model, tokenize_chats
from glm5.train.claim import claimed
from glm5.train.data import iter_chats
from glm5.train.loop import TrainLoop
from glm5.train.metrics import MetricsLog
from glm5.train.optimizer import build_optimizer, build_scheduler, wrap_data_parallel
from glm5.train.packing import PackedDataset
from glm5.train.run_config import LoraSection, RunConfig
from glm5.train.state import TrainState, is_writer
from glm5.train.stop import StopRequest
from glm5.train.template import load_tokenizer


@dataclass(frozen=True)
class TrainResult:
    """How a run ended."""

    checkpoint: Path
    step: int
    stopped_by: str | None
    """Name of the signal that ended it early; None when all steps were taken."""


def _say_nothing(text: str) -> None:
    del text


def train(
    run: RunConfig,
    *,
    say: Callable[[str], None] = _say_nothing,
    quiet: bool = False,
) -> TrainResult:
    """Trains as the run says, resuming where it may, and saves at the end or when stopped.

    `say` hears on the first rank what the data and the model came to; progress goes to standard
    error unless `quiet`.

    Raises:
        ConfigError, DataError, CheckpointError, AdapterError, LayoutError: bad input, before any
        step. DivergedError: the loss is no longer a number.
    """
    ensure_distributed(
        default_device(), parallel_layout(run), timeout_minutes=run.train.timeout_minutes
    )
    with claimed(run.output.dir) if is_writer() else nullcontext():
        return _train(run, say if is_writer() else _say_nothing, quiet)


def _train(run: RunConfig, say: Callable[[str], None], quiet: bool) -> TrainResult:
    folder = hf_folder(run.model.path)
    if is_writer():
        remove_partials(run.output.dir / STEPS_FOLDER)
    resume_step = find_resume_step(run)
    start = run.lora.init_from if run.lora is not None and not resume_step else None
    if start is not None:
        check_adapter_folder(start)
    inputs = input_fingerprints(run, folder)
    if resume_step:
        check_inputs(step_folder(run.output.dir, resume_step), inputs)
    glm5 = Glm5Config.from_hf(folder)
    train_data, eval_data = load_datasets(run, folder, glm5)
    say(describe_data("train", train_data))
    if eval_data is not None:
        say(describe_data("eval", eval_data))
    chunks = build_trainable(run, folder)
    say(describe_model(chunks))
    if start is not None:
        start_from_adapter(chunks, start)
        say(f"starting from the adapter in {start}")
    if resume_step:
        say(f"resuming from step {resume_step}")
    state = _train_state(run, chunks)
    if resume_step:
        state.load(step_folder(run.output.dir, resume_step))
    loop = TrainLoop(state, train_data, eval_data, run.train, shuffle=run.data.shuffle)

    def save(step: int) -> Path:
        record = checkpoint_record(run, chunks[0].config.glm5, step, inputs)
        return state.save(run.output.dir, record, folder, run.train.keep)

    log = _metrics_log(run, resume_step + 1, quiet)
    try:
        with StopRequest() as stop:
            step = loop.run(resume_step + 1, log, save, stop)
    finally:
        if log is not None:
            log.close()
    return TrainResult(step_folder(run.output.dir, step), step, stop.asked_by)


def find_resume_step(run: RunConfig) -> int:
    """The step that the run goes on from; 0 for a new run.

    Raises:
        ConfigError: the output folder is taken, has nothing to resume, or is of another run.
    """
    steps = saved_steps(run.output.dir)
    if run.train.resume == "never" and steps:
        raise ConfigError(
            "the output folder already holds checkpoints",
            got=f"{run.output.dir}: steps {steps}",
            expected="a new folder, since train.resume is 'never'",
            remedy="choose another output.dir, or set train.resume = 'auto'",
        )
    if not steps:
        if run.train.resume == "must":
            raise ConfigError(
                "there is nothing to resume",
                got=f"no checkpoint in {run.output.dir}",
                remedy="check output.dir, or set train.resume = 'auto'",
            )
        return 0
    _check_same_run(run, step_folder(run.output.dir, steps[-1]))
    if steps[-1] >= run.train.steps:
        raise ConfigError(
            "the run is finished already",
            got=f"a checkpoint of step {steps[-1]}",
            expected=f"fewer than train.steps = {run.train.steps}",
            remedy="raise train.steps, or choose another output.dir",
        )
    return steps[-1]


def load_datasets(
    run: RunConfig, folder: Path, glm5: Glm5Config
) -> tuple[PackedDataset, PackedDataset | None]:
    """Reads, tokenises and packs the run's chats.

    Raises:
        DataError: bad lines, each with its file and number.
    """
    tokenizer = ChatTokenizer(
        load_tokenizer(folder), glm5.eos_token_id, run.data.chat_template_args
    )
    chats = tokenize_chats(iter_chats(run.data.train, max_samples=run.data.max_samples), tokenizer)
    limits = {
        "vocab_size": glm5.vocab_size,
        "longest": glm5.max_position_embeddings,
        "cut_at": run.data.seq_length,
    }
    check_fits_model(chats, **limits)
    train_data = PackedDataset(
        chats,
        run.data.seq_length,
        too_long=run.data.too_long,
        shuffle=run.data.shuffle,
        seed=run.train.seed,
    )
    if run.data.eval is None:
        return train_data, None
    eval_chats = tokenize_chats(iter_chats(run.data.eval), tokenizer)
    check_fits_model(eval_chats, **limits)
    return train_data, PackedDataset(eval_chats, run.data.seq_length, too_long=run.data.too_long)


def build_trainable(run: RunConfig, folder: Path) -> list[GPTModel]:
    """This rank's stages of the model of the run, with adapters attached when it has them."""
    chunks = load_chunks(
        folder,
        backend=run.model.attention_backend,
        dtype=run.model.dtype,
        deterministic_attention=run.model.deterministic_attention,
        recompute=run.model.recompute,
        include_mtp=run.model.mtp,
        indexer_loss_coeff=run.indexer_loss_coeff,
        latent_norm_eps=run.model.latent_norm_eps,
        layers_per_stage=run.layout.layers_per_stage,
        attention_parallel=run.layout.attention_parallel,
    )
    if run.lora is not None:
        adapt(chunks, lora_record(run.lora), seed=run.train.seed)
    return [chunk.train() for chunk in chunks]


def describe_data(name: str, data: PackedDataset) -> str:
    """One line on a data set; chats that were cut or left out are never passed over."""
    line = f"{name}: {len(data)} rows, {data.num_tokens:,} tokens, {data.fill:.0%} full"
    if data.num_truncated or data.num_skipped:
        line += f"; {data.num_truncated} chats truncated, {data.num_skipped} skipped"
    return line


def describe_model(chunks: Sequence[GPTModel]) -> str:
    """One line on what trains."""
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    total = sum(parameter.numel() for parameter in parameters)
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    device = parameters[0].device
    return f"model: {total:,} parameters, {trained:,} of them train, on {device}"


def parallel_layout(run: RunConfig) -> Layout:
    """The sizes of the `[layout]` table."""
    sizes = run.layout
    return Layout(tp=sizes.tp, pp=sizes.pp, vpp=sizes.vpp, cp=sizes.cp, ep=sizes.ep, etp=sizes.etp)


def lora_record(section: LoraSection) -> LoraRecord:
    """The `[lora]` table as a checkpoint records it."""
    return LoraRecord.model_validate(section.model_dump(mode="json", exclude={"init_from"}))


def input_fingerprints(run: RunConfig, folder: Path) -> dict[str, str]:
    """Of the base and the data of a run."""
    data = {"data.train": run.data.train, "data.eval": run.data.eval or ()}
    missing = [str(path) for paths in data.values() for path in paths if not path.is_file()]
    if missing:
        raise DataError("no such data file", got=", ".join(missing))
    return base_fingerprints(folder) | {
        name: files_fingerprint(paths) for name, paths in data.items()
    }


def check_inputs(checkpoint: Path, inputs: Mapping[str, str]) -> None:
    """A resumed run must find what it was started from.

    Raises:
        ConfigError: the base, the tokenizer or the data changed since `checkpoint`.
    """
    if changed := changed_inputs(read_record(checkpoint).inputs, inputs):
        raise ConfigError(
            "files changed since the run was started",
            got=f"changed: {', '.join(changed)}",
            expected=f"the files that {checkpoint} was trained on",
            remedy="put them back, or choose another output.dir",
        )


def checkpoint_record(
    run: RunConfig, glm5: Glm5Config, step: int, inputs: dict[str, str]
) -> CheckpointRecord:
    """What the checkpoint of `step` says about itself."""
    lora = run.lora
    return CheckpointRecord(
        kind="adapter" if lora else "model",
        step=step,
        config=glm5.to_hf_dict(),
        dtype=run.model.dtype,
        include_mtp=run.model.mtp,
        base=run.model.path if lora else None,
        lora=lora_record(lora) if lora else None,
        inputs=inputs,
        run=run.to_toml_dict(),
    )


def _train_state(run: RunConfig, chunks: Sequence[GPTModel]) -> TrainState:
    wrapped = wrap_data_parallel(chunks)
    optimizer = build_optimizer(wrapped, run.optimizer)
    return TrainState(
        wrapped, optimizer, build_scheduler(optimizer, run.optimizer, run.train.steps)
    )


def _metrics_log(run: RunConfig, first_step: int, quiet: bool) -> MetricsLog | None:
    if not is_writer():
        return None
    return MetricsLog(
        run.output.dir,
        total_steps=run.train.steps,
        first_step=first_step,
        tensorboard=run.output.tensorboard,
        quiet=quiet,
    )


def _check_same_run(run: RunConfig, checkpoint: Path) -> None:
    record = read_record(checkpoint)
    before = RunConfig.from_dict(record.run or {}, source=str(checkpoint))
    if changed := run.differences(before):
        raise ConfigError(
            "the run differs from the one that it would resume",
            got=f"changed: {', '.join(changed)}",
            expected=f"the settings recorded in {checkpoint}",
            remedy="undo the changes, or choose another output.dir",
        )
