"""Prompts with their labels: read, checked and tokenised as the chats of fine-tuning are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from glm5.errors import DataError
from glm5.rl.rewards import Label
from glm5.train.chat import ChatTokenizer, check_ids, tokenize_all
from glm5.train.data import Problems, iter_rows
from glm5.train.row import BadRow, label_of, question_of, tools_of

TooLong = Literal["error", "skip"]


@dataclass(frozen=True)
class Question:
    """One row: what is asked, a string or messages, and what its reward knows.

    row: all columns, as they were read. source: `file:line`.
    """

    asked: str | tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...]
    label: Label
    row: Mapping[str, Any]
    source: str


@dataclass(frozen=True)
class Prompt:
    """One prompt in tokens: ids [p] int32, p >= 1, generation prompt included; see `Question`."""

    ids: NDArray[np.int32]
    label: Label
    row: Mapping[str, Any]
    source: str


@dataclass(frozen=True)
class PromptSet:
    """All prompts of a run, at least one; BatchOrder says which of them a step takes.

    num_skipped: prompts left out, as too long.
    """

    prompts: tuple[Prompt, ...]
    num_skipped: int


def iter_questions(
    paths: Sequence[Path], *, needs_label: bool, max_samples: int | None = None
) -> Iterator[Question]:
    """Yield the rows of .jsonl and .parquet files in order.

    A row has `prompt`, a string, or messages as in `iter_chats`, of which the last one is not an
    assistant's, in `messages` or in `prompt`; perhaps `tools`; and `label`, a string or a
    number, which may be absent or null unless needs_label.

    Raises:
        DataError: as `iter_rows`, with file and line.
    """

    def question(row: Any, source: str) -> Question:
        asked, label = question_of(row), label_of(row)
        if label is None and needs_label:
            raise BadRow("no label, which the reward needs")
        return Question(asked, tools_of(row), label, row, source)

    return iter_rows(
        paths,
        question,
        noun="prompts",
        needs=("prompt", "messages"),
        columns=None,
        max_samples=max_samples,
    )


def load_prompts(
    paths: Sequence[Path],
    tokenizer: ChatTokenizer,
    *,
    vocab_size: int,
    max_prompt_tokens: int,
    needs_label: bool,
    too_long: TooLong = "error",
    raw: bool = False,
    max_samples: int | None = None,
) -> PromptSet:
    """Reads and tokenises the prompts of a run.

    A string is a user's message, or with `raw` the very text that the model goes on from: no chat
    template, nothing added. Longer prompts than max_prompt_tokens are errors, or left out.

    Raises:
        DataError: rows that cannot be used, all of them with file and line; no prompt is left; a
            token that the model does not have.
    """

    def tokenize(question: Question) -> Prompt:
        ids = _ids(question, tokenizer, raw)
        return Prompt(ids, question.label, question.row, question.source)

    questions = iter_questions(paths, needs_label=needs_label, max_samples=max_samples)
    prompts = tokenize_all(questions, tokenize, "prompts")
    for prompt in prompts:
        check_ids(prompt.ids, prompt.source, vocab_size)
    fitting = [prompt for prompt in prompts if len(prompt.ids) <= max_prompt_tokens]
    if too_long == "error":
        _refuse_long(prompts, max_prompt_tokens)
    if not fitting:
        raise DataError("no prompt is left to sample from", got=f"{len(prompts)} skipped")
    return PromptSet(tuple(fitting), len(prompts) - len(fitting))


def _ids(question: Question, tokenizer: ChatTokenizer, raw: bool) -> NDArray[np.int32]:
    if not isinstance(question.asked, str):
        return tokenizer.prompt(question.asked, question.tools)
    if not raw:
        return tokenizer.prompt([{"role": "user", "content": question.asked}], question.tools)
    if question.tools:
        raise DataError(
            "tools need the chat template, which a raw prompt does not go through",
            remedy="write them into the prompt, or give messages",
        )
    encoded = tokenizer.tokenizer(question.asked, add_special_tokens=False)
    return np.array(encoded["input_ids"], dtype=np.int32)


def _refuse_long(prompts: Sequence[Prompt], max_prompt_tokens: int) -> None:
    problems = Problems()
    for prompt in prompts:
        if (length := len(prompt.ids)) > max_prompt_tokens:
            problems.add(prompt.source, f"{length} tokens, more than {max_prompt_tokens}")
    problems.raise_if_any(
        "prompts that are too long",
        "raise data.max_prompt_tokens, or rl.max_tokens_per_micro_batch if that is not given; or "
        "take them out, as data.too_long = 'skip' does",
    )
