"""`glm5 train` of a run file of supervised fine-tuning: from chats to a trained checkpoint."""

from __future__ import annotations

from pathlib import Path

from glm5.config import Glm5Config
from glm5.train.chat import ChatTokenizer, check_fits_model, tokenize_chats
from glm5.train.data import iter_chats
from glm5.train.loop import TrainLoop
from glm5.train.packing import PackedDataset
from glm5.train.run_config import RunConfig
from glm5.train.session import (
    Progress,
    Say,
    TrainResult,
    find_start,
    hear_nothing,
    in_output_folder,
    say_nothing,
    start_state,
    take_steps,
)
from glm5.train.state import is_writer
from glm5.train.template import load_tokenizer


def train(
    run: RunConfig,
    *,
    say: Say = say_nothing,
    reading: Progress = hear_nothing,
    quiet: bool = False,
) -> TrainResult:
    """Trains as the run says, resuming where it may, and saves at the end or when stopped.

    `say` hears on the first rank what the data and the model came to, and `reading` of (bytes read
    of its part of the model, of how many); progress of the steps goes to standard error unless
    `quiet`.

    Raises:
        ConfigError, DataError, CheckpointError, AdapterError, LayoutError: bad input, before any
        step. DivergedError: the loss is no longer a number.
    """
    with in_output_folder(run):
        if not is_writer():
            say, reading = say_nothing, hear_nothing
        return _train(run, say, reading, quiet)


def _train(run: RunConfig, say: Say, reading: Progress, quiet: bool) -> TrainResult:
    start = find_start(run, {"data.train": run.data.train, "data.eval": run.data.eval or ()})
    glm5 = Glm5Config.from_hf(start.folder)
    train_data, eval_data = load_datasets(run, start.folder, glm5)
    say(describe_data("train", train_data))
    if eval_data is not None:
        say(describe_data("eval", eval_data))
    state = start_state(run, start, say, reading)
    loop = TrainLoop(state, train_data, eval_data, run.train, shuffle=run.data.shuffle)
    return take_steps(run, start, state, loop, quiet)


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


def describe_data(name: str, data: PackedDataset) -> str:
    """One line on a data set; chats that were cut or left out are never passed over."""
    line = f"{name}: {len(data)} rows, {data.num_tokens:,} tokens, {data.fill:.0%} full"
    if data.num_truncated or data.num_skipped:
        line += f"; {data.num_truncated} chats truncated, {data.num_skipped} skipped"
    return line
