"""The chat data of a tiny checkpoint: short tasks with one right answer each, made by rule."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from itertools import permutations

NUM_TRAIN_CHATS = 200
NUM_EVAL_CHATS = 20
SYSTEM_PROMPT = "Answer with the result only."

NUM_SHUFFLED_CHATS = 2000
DIGITS = "0123456789"

Message = dict[str, str]


def tiny_chats(seed: int) -> tuple[str, str]:
    """The train and the eval set as JSONL of `{"messages": [...]}`, with no question in both."""
    rng = random.Random(seed)
    chats: dict[str, list[Message]] = {}
    while len(chats) < NUM_TRAIN_CHATS + NUM_EVAL_CHATS:
        chat = _chat(rng)
        question = next(m["content"] for m in chat if m["role"] == "user")
        chats.setdefault(question, chat)
    rows = [{"messages": chat} for chat in chats.values()]
    return _jsonl(rows[:NUM_TRAIN_CHATS]), _jsonl(rows[NUM_TRAIN_CHATS:])


def sorting_task(seed: int) -> tuple[str, str]:
    """A task for reinforcement learning, as JSONL: chats to start from, and prompts with labels.

    A prompt is three different digits, its label the same in ascending order. The chats answer such
    prompts with the digits in any order: a model that has learnt them is right one time in six,
    and has all right answers within reach. The prompts are all that there are.
    """
    rng = random.Random(f"sorting {seed}")
    chats = []
    for _ in range(NUM_SHUFFLED_CHATS):
        digits = rng.sample(DIGITS, 3)
        answer = rng.sample(digits, 3)
        chats.append(_exchange("".join(digits), "".join(answer)))
    prompts = [
        {"prompt": "".join(digits), "label": "".join(sorted(digits))}
        for digits in permutations(DIGITS, 3)
    ]
    return _jsonl({"messages": chat} for chat in chats), _jsonl(prompts)


def _exchange(question: str, answer: str) -> list[Message]:
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": answer},
    ]


def _jsonl(rows: Iterable[object]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def _chat(rng: random.Random) -> list[Message]:
    """One chat of one or two turns; every third one or so has a system message."""
    messages: list[Message] = []
    if rng.random() < 1 / 3:
        messages.append({"role": "system", "content": SYSTEM_PROMPT})
    for _ in range(rng.choice((1, 1, 2))):
        question, answer = rng.choice(_TASKS)(rng)
        messages += _exchange(question, answer)
    return messages


def _add(rng: random.Random) -> tuple[str, str]:
    a, b = rng.randrange(50), rng.randrange(50)
    return f"{a} + {b} =", str(a + b)


def _echo(rng: random.Random) -> tuple[str, str]:
    word = _word(rng)
    return f"repeat: {word}", word


def _reverse(rng: random.Random) -> tuple[str, str]:
    word = _word(rng)
    return f"reverse: {word}", word[::-1]


def _word(rng: random.Random) -> str:
    return "".join(rng.choice("abcdefgh") for _ in range(rng.randint(3, 6)))


_TASKS: tuple[Callable[[random.Random], tuple[str, str]], ...] = (_add, _echo, _reverse)
