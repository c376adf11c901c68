"""`glm5 train` of a run file with `[rl]`: from prompts to a trained checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from glm5.checkpoint.adapter_engines import check_servable
from glm5.config import Glm5Config
from glm5.errors import ConfigError
from glm5.rl.collect import Collector
from glm5.rl.engine import (
    build_engine,
    check_records,
    describe_quantised_base,
    engine_latent_norm_eps,
    trainer_products,
)
from glm5.rl.first_rank import FirstRank
from glm5.rl.loop import RlLoop
from glm5.rl.products import describe_products
from glm5.rl.prompts import PromptSet, load_prompts
from glm5.rl.rewards import Reward, build_reward
from glm5.rl.rollout import Engine, Sampling
from glm5.rl.run_config import RlConfig
from glm5.rl.samples import pick_samples, sample_table
from glm5.rl.sync import WeightSync, consumer_of
from glm5.runtime.distributed import default_device
from glm5.train.chat import ChatTokenizer
from glm5.train.session import (
    Progress,
    Say,
    Start,
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

Show = Callable[[Table], None]
SHOWN_SAMPLES = 6


def show_nothing(table: Table) -> None:
    """For those who do not look."""
    del table


@dataclass(frozen=True)
class _Text:
    """From token ids to text, and prompts to token ids."""

    tokenizer: ChatTokenizer

    def response(self, ids: Sequence[int]) -> str:
        """What a reward sees: without special tokens, such as that which ended it."""
        return str(self.tokenizer.tokenizer.decode(ids, skip_special_tokens=True))

    def exact(self, ids: Sequence[int]) -> str:
        """Special tokens and all."""
        return str(self.tokenizer.tokenizer.decode(ids))


def train_rl(
    run: RlConfig,
    *,
    engine: Engine | None = None,
    say: Say = say_nothing,
    show: Show = show_nothing,
    reading: Progress = hear_nothing,
    quiet: bool = False,
) -> TrainResult:
    """Trains as the run says, resuming where it may, and saves at the end or when stopped.

    `engine` takes the place of the one that the run names; the run gives it back at its end. `say`
    hears on the first rank what the data and the model came to, `reading` of (bytes of its part of
    the model read, of how many), and `show` gets a few completions of the last step; progress of
    the steps goes to standard error unless `quiet`.

    Raises:
        ConfigError, DataError, CheckpointError, AdapterError, LayoutError: bad input, before any
        step. EngineError, RewardError: a step could not be sampled, recorded or scored; the steps
        before it are saved. GapError: engine and trainer disagree; the same. DivergedError: a loss
        or a log-probability is no longer a number.
    """
    with in_output_folder(run):
        if not is_writer():
            say, reading = say_nothing, hear_nothing
        return _train(run, engine, say, show, reading, quiet)


def _train(
    run: RlConfig, engine: Engine | None, say: Say, show: Show, reading: Progress, quiet: bool
) -> TrainResult:
    start = find_start(run, _data_files(run))
    glm5 = _engine_config(run, start.folder)
    _check_targets(run)
    first_rank = FirstRank(run.train.timeout_minutes)
    text = _Text(
        ChatTokenizer(load_tokenizer(start.folder), glm5.eos_token_id, run.data.chat_template_args)
    )
    collector = first_rank.keep(lambda: _collector(run, start, glm5, text, engine, say))
    try:
        return _take_steps(run, start, glm5, collector, first_rank, text, say, show, reading, quiet)
    finally:
        if collector is not None:
            collector.close()


def _take_steps(
    run: RlConfig,
    start: Start,
    glm5: Glm5Config,
    collector: Collector | None,
    first_rank: FirstRank,
    text: _Text,
    say: Say,
    show: Show,
    reading: Progress,
    quiet: bool,
) -> TrainResult:
    model = run.model.model_copy(update={"latent_norm_eps": glm5.latent_norm_eps})
    state = start_state(run.model_copy(update={"model": model}), start, say, reading)
    chunks = [chunk.module for chunk in state.chunks]
    sync = WeightSync(run, chunks, start.folder, first_rank)
    first_rank.keep(sync.clear)
    loop = RlLoop(run, state, collector, sync, first_rank, text.exact)
    result = take_steps(run, start, state, loop, quiet)
    if is_writer():
        show(sample_table(result.step, pick_samples(loop.samples, SHOWN_SAMPLES)))
    return result


def _collector(
    run: RlConfig, start: Start, glm5: Glm5Config, text: _Text, engine: Engine | None, say: Say
) -> Collector:
    _check_stop_tokens(run, glm5)
    reward = build_reward(run.reward)
    prompts = _prompts(run, glm5, text.tokenizer, reward)
    say(_describe(prompts))
    engine = engine or build_engine(run, start.folder, glm5, default_device())
    check_records(run, engine)
    say(describe_products(trainer_products(run), engine.products))
    if note := describe_quantised_base(run, glm5):
        say(note)
    sampling = Sampling(
        temperature=run.rollout.temperature,
        top_p=run.rollout.top_p,
        max_new_tokens=run.rollout.max_new_tokens,
        stop_token_ids=run.rollout.stop_token_ids or tuple(glm5.eos_token_id),
        seed=run.train.seed,
    )
    return Collector(
        engine,
        prompts.prompts,
        reward,
        text.response,
        run.rl,
        sampling,
        shuffle=run.data.shuffle,
        sleep=run.rollout.sleep,
    )


def _prompts(
    run: RlConfig, glm5: Glm5Config, tokenizer: ChatTokenizer, reward: Reward
) -> PromptSet:
    room = min(run.rl.max_tokens_per_micro_batch, glm5.max_position_embeddings)
    longest = room - run.rollout.max_new_tokens
    wanted = run.data.max_prompt_tokens or max(1, longest)
    if wanted > longest:
        raise ConfigError(
            "a prompt and its completion do not fit",
            got=f"prompts of {wanted} tokens and rollout.max_new_tokens = "
            f"{run.rollout.max_new_tokens}",
            expected=f"at most {room} tokens together: the smaller of "
            "rl.max_tokens_per_micro_batch and the model's max_position_embeddings",
            remedy="lower rollout.max_new_tokens or data.max_prompt_tokens, or raise "
            "rl.max_tokens_per_micro_batch",
        )
    return load_prompts(
        run.data.prompts,
        tokenizer,
        vocab_size=glm5.vocab_size,
        max_prompt_tokens=wanted,
        needs_label=reward.needs_label,
        too_long=run.data.too_long,
        raw=run.data.raw,
        max_samples=run.data.max_samples,
    )


def _check_stop_tokens(run: RlConfig, glm5: Glm5Config) -> None:
    if wrong := [id_ for id_ in run.rollout.stop_token_ids or () if id_ >= glm5.vocab_size]:
        raise ConfigError(
            "rollout.stop_token_ids has tokens that the model cannot draw",
            got=", ".join(map(str, wrong)),
            expected=f"ids below {glm5.vocab_size}",
            remedy="leave it out for the model's eos_token_id",
        )


def _describe(prompts: PromptSet) -> str:
    line = f"prompts: {len(prompts.prompts)}"
    return f"{line}; {prompts.num_skipped} skipped" if prompts.num_skipped else line


def _engine_config(run: RlConfig, folder: Path) -> Glm5Config:
    """The model as engine and trainer both compute it."""
    glm5 = Glm5Config.from_hf(folder)
    return glm5.model_copy(update={"latent_norm_eps": engine_latent_norm_eps(run, glm5)})


def _check_targets(run: RlConfig) -> None:
    """Before a model is loaded for it.

    Raises:
        AdapterError: the engine cannot serve what is to be adapted.
    """
    consumer = consumer_of(run.rollout.engine)
    if run.lora is not None and consumer != "peft":
        check_servable(run.lora.targets, consumer)


def _data_files(run: RlConfig) -> dict[str, Sequence[Path]]:
    """What a resumed run must find unchanged."""
    files: dict[str, Sequence[Path]] = {"data.prompts": run.data.prompts}
    home = (run.reward.function or "").rpartition(":")[0]
    return files | ({"reward.function": [Path(home)]} if home.endswith(".py") else {})
