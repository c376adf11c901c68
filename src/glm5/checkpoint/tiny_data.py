"""The chat data of a tiny checkpoint: short tasks with one right answer each, made by rule."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

NUM_TRAIN_CHATS = 200
NUM_EVAL_CHATS = 20
SYSTEM_PROMPT = "Answer with the result only."

Message = dict[str, str]


def tiny_chats(seed: int) -> tuple[str, str]:
    """The train and the eval set as JSONL of `{"messages": [...]}`, with no question in both."""
    rng = random.Random(seed)
    chats: dict[str, list[Message]] = {}
    while len(chats) < NUM_TRAIN_CHATS + NUM_EVAL_CHATS:
        chat = _chat(rng)
        question = next(m["content"] for m in chat if m["role"] == "user")
        chats.setdefault(question, chat)
    lines = [json.dumps({"messages": chat}) + "\n" for chat in chats.values()]
    return "".join(lines[:NUM_TRAIN_CHATS]), "".join(lines[NUM_TRAIN_CHATS:])


def _chat(rng: random.Random) -> list[Message]:
    """One chat of one or two turns; every third one or so has a system message."""
    messages: list[Message] = []
    if rng.random() < 1 / 3:
        messages.append({"role": "system", "content": SYSTEM_PROMPT})
    for _ in range(rng.choice((1, 1, 2))):
        question, answer = rng.choice(_TASKS)(rng)
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer})
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
