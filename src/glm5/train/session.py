"""From a run file of any kind to steps: what is resumed, what is built, what is saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from glm5.checkpoint.adapter_start import check_adapter_folder, start_from_adapter
from glm5.checkpoint.atomic import remove_partials
from glm5.checkpoint.ckpt_dir import STEPS_FOLDER, step_folder
from glm5.checkpoint.hf_folder import hf_folder
from glm5.runtime.distributed import default_device, ensure_distributed
from glm5.train.claim import claimed
from glm5.train.metrics import MetricsLog
from glm5.train.resume import (
    check_inputs,
    checkpoint_record,
    find_resume_step,
    input_fingerprints,
)
from glm5.train.run_file import RunFile
from glm5.train.state import TrainState, is_writer
from glm5.train.steps import StepLoop
from glm5.train.stop import StopRequest
from glm5.train.trainable import (
    build_state,
    build_trainable,
    check_splits,
    describe_model,
    parallel_layout,
)

Say = Callable[[str], None]
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class TrainResult:
    """How a run ended."""

    checkpoint: Path
    step: int
    stopped_by: str | None
    """Name of the signal that ended it early; None when all steps were taken."""


@dataclass(frozen=True)
class Start:
    """Where a run starts."""

    folder: Path
    """Of the base, in Hugging Face's layout."""
    resume_step: int
    """Of the checkpoint that it goes on from; 0 for a new run."""
    inputs: Mapping[str, str]
    """Fingerprints of what it is started from."""


def say_nothing(text: str) -> None:
    """For those who do not listen."""
    del text


def hear_nothing(done: int, total: int) -> None:
    """The same, of progress."""
    del done, total


@contextmanager
def in_output_folder(run: RunFile) -> Iterator[None]:
    """Meets the run's other processes, and holds its output folder for all of them.

    Raises:
        LayoutError: the layout does not fit the processes. ConfigError: the folder is taken.
    """
    ensure_distributed(
        default_device(), parallel_layout(run), timeout_minutes=run.train.timeout_minutes
    )
    with claimed(run.output.dir) if is_writer() else nullcontext():
        yield


def find_start(run: RunFile, data: Mapping[str, Sequence[Path]]) -> Start:
    """Finds the base and the checkpoint to go on from; `data` are the data files by setting.

    Raises:
        ConfigError, DataError, CheckpointError, AdapterError: what the run is started from is
        missing, or is not what it was started from before. LayoutError: the model cannot be split
        as the run says.
    """
    folder = hf_folder(run.model.path)
    if is_writer():
        remove_partials(run.output.dir / STEPS_FOLDER)
    resume_step = find_resume_step(run)
    if run.lora is not None and run.lora.init_from is not None and not resume_step:
        check_adapter_folder(run.lora.init_from)
    inputs = input_fingerprints(folder, data)
    if resume_step:
        check_inputs(step_folder(run.output.dir, resume_step), inputs)
    check_splits(run, folder)
    return Start(folder, resume_step, inputs)


def start_state(run: RunFile, start: Start, say: Say, reading: Progress) -> TrainState:
    """Loads the base, what trains on it, and the checkpoint where there is one."""
    chunks = build_trainable(run, start.folder, reading)
    say(describe_model(chunks))
    init_from = None if run.lora is None else run.lora.init_from
    if init_from is not None and not start.resume_step:
        start_from_adapter(chunks, init_from)
        say(f"starting from the adapter in {init_from}")
    if start.resume_step:
        say(f"resuming from step {start.resume_step}")
    state = build_state(run, chunks)
    if start.resume_step:
        state.load(step_folder(run.output.dir, start.resume_step))
    return state


def take_steps(
    run: RunFile, start: Start, state: TrainState, loop: StepLoop, quiet: bool
) -> TrainResult:
    """Runs the loop with its metrics log, its checkpoints and a clean stop."""
    glm5 = state.chunks[0].module.config.glm5

    def save(step: int) -> Path:
        record = checkpoint_record(run, glm5, step, dict(start.inputs))
        return state.save(run.output.dir, record, start.folder, run.train.keep)

    log = _metrics_log(run, start.resume_step + 1, quiet)
    try:
        with StopRequest() as stop:
            step = loop.run(start.resume_step + 1, log, save, stop)
    finally:
        if log is not None:
            log.close()
    return TrainResult(step_folder(run.output.dir, step), step, stop.asked_by)


def _metrics_log(run: RunFile, first_step: int, quiet: bool) -> MetricsLog | None:
    if not is_writer():
        return None
    return MetricsLog(
        run.output.dir,
        total_steps=run.train.steps,
        first_step=first_step,
        tensorboard=run.output.tensorboard,
        quiet=quiet,
    )
