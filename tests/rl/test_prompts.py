"""Prompts: what a row may hold, how it becomes tokens, and every bad one named with its place."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers.processors import TemplateProcessing

from glm5.errors import DataError
from glm5.rl.prompts import Prompt, PromptSet, iter_questions, load_prompts
from glm5.train.chat import ChatTokenizer
from glm5.train.packing import BatchOrder
from tests.train.test_chat import CHATML, ENDOFTEXT, GLM, GLM_STOPS, byte_tokenizer

USER = {"role": "user", "content": "2+2?"}
ASSISTANT = {"role": "assistant", "content": "4"}
GOOD = {"prompt": "2+2?", "label": "4"}
TOOLS = [{"type": "function", "function": {"name": "add"}}]


def write(folder: Path, *rows: object) -> Path:
    path = folder / "prompts.jsonl"
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path.write_bytes(b"\n".join(lines))
    return path


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., PromptSet]:
    """load(*rows, **options) -> the prompts of a file of these rows, by GLM's template."""

    def get(*rows: object, **options: Any) -> PromptSet:
        template = options.pop("template", GLM)
        tokenizer = ChatTokenizer(byte_tokenizer(template), GLM_STOPS, options.pop("args", {}))
        options = {"vocab_size": 300, "max_prompt_tokens": 100, "needs_label": False} | options
        return load_prompts([write(tmp_path, *rows)], tokenizer, **options)

    return get


def text_of(prompt: Prompt) -> str:
    assert prompt.ids.dtype == np.int32
    return str(byte_tokenizer(GLM).decode(prompt.ids.tolist()))


def test_a_string_is_a_user_s_message(load: Callable[..., PromptSet]) -> None:
    as_string, as_messages, as_chat = load(
        GOOD, {"messages": [USER], "label": 4}, {"prompt": [USER], "label": 0.5}
    ).prompts
    assert text_of(as_string) == "[gMASK]<sop><|user|>2+2?<|assistant|><think>"
    assert text_of(as_messages) == text_of(as_chat) == text_of(as_string)
    assert (as_string.label, as_messages.label, as_chat.label) == ("4", 4, 0.5)


def test_the_whole_conversation_and_tools_are_in_the_prompt(load: Callable[..., PromptSet]) -> None:
    system = {"role": "system", "content": "be kind"}
    (prompt,) = load({"messages": [system, USER, ASSISTANT, USER], "tools": TOOLS}).prompts
    text = text_of(prompt)
    assert text.startswith("[gMASK]<sop><|system|>{") and '"add"' in text
    turns = "<|user|>2+2?<|assistant|></think>4<|user|>2+2?<|assistant|><think>"
    assert text.endswith(f"be kind{turns}")


def test_variables_of_the_template_choose_the_generation_prompt(
    load: Callable[..., PromptSet],
) -> None:
    (prompt,) = load(GOOD, args={"enable_thinking": False}).prompts
    assert text_of(prompt).endswith("<|assistant|></think>")


def test_a_raw_prompt_is_the_text_itself_with_its_special_tokens(
    load: Callable[..., PromptSet],
) -> None:
    raw, chat = load({"prompt": "<|endoftext|>sort 3 1 2:"}, {"messages": [USER]}, raw=True).prompts
    assert raw.ids[0] == ENDOFTEXT and text_of(raw) == "<|endoftext|>sort 3 1 2:"
    assert text_of(chat).startswith("[gMASK]")
    with pytest.raises(DataError, match="tools need the chat template"):
        load({**GOOD, "tools": TOOLS}, raw=True)


def test_a_tokenizer_adds_nothing_to_a_raw_prompt(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(GLM)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", ENDOFTEXT)]
    )
    assert tokenizer("a")["input_ids"][0] == ENDOFTEXT
    (prompt,) = load_prompts(
        [write(tmp_path, {"prompt": "a"})],
        ChatTokenizer(tokenizer, GLM_STOPS),
        vocab_size=300,
        max_prompt_tokens=100,
        needs_label=False,
        raw=True,
    ).prompts
    assert len(prompt.ids) == 1 and prompt.ids[0] != ENDOFTEXT


def test_reward_functions_see_the_whole_row(load: Callable[..., PromptSet]) -> None:
    (prompt,) = load({**GOOD, "tests": ["f(1) == 2"], "level": 3}).prompts
    assert prompt.row == {**GOOD, "tests": ["f(1) == 2"], "level": 3}
    assert prompt.source.endswith("prompts.jsonl:1")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (b"{", "invalid JSON"),
        ([GOOD], "not an object but a list"),
        ({"label": "4"}, "no prompt and no messages"),
        ({"prompt": None, "messages": None}, "no prompt and no messages"),
        ({**GOOD, "messages": [USER]}, "both prompt and messages"),
        ({"prompt": " \n"}, "prompt is empty"),
        ({"prompt": 3}, "prompt is not a string or a list but a number"),
        ({"prompt": []}, "prompt is empty"),
        ({"prompt": ["hi"]}, "prompt[0] is not an object but a string"),
        ({"messages": "hi"}, "messages is not a list but a string"),
        ({"messages": [USER, ASSISTANT]}, "the last of messages is an assistant's"),
        ({"prompt": [ASSISTANT]}, "the last of prompt is an assistant's"),
        ({"prompt": "x", "label": True}, "label is not a string or a number but a boolean"),
        ({"prompt": "x", "label": ["4"]}, "label is not a string or a number but a list"),
        (b'{"prompt": "x", "label": 1e999}', "label is inf, which is no number"),
        (b'{"prompt": "x", "label": NaN}', "NaN is no JSON number"),
        (b'{"prompt": "\\ud800"}', "prompt has half of a surrogate pair"),
        (b'{"prompt": "x", "label": "\\ud800"}', "label has half of a surrogate pair"),
        ({**GOOD, "tools": "[{]"}, "tools: invalid JSON"),
        ({"prompt": "<|user|>x"}, "contains the special token <|user|>"),
    ],
)
def test_bad_rows_are_named(load: Callable[..., PromptSet], row: object, reason: str) -> None:
    with pytest.raises(DataError) as caught:
        load(GOOD, row, GOOD)
    message = str(caught.value)
    assert "prompts.jsonl:2: " in message and reason in message
    assert ": 1\n" in message


def test_labels_are_required_where_the_reward_needs_them(load: Callable[..., PromptSet]) -> None:
    rows = [GOOD, {"prompt": "x"}, {"prompt": "y", "label": None}, {"prompt": "z", "label": 0}]
    assert [prompt.label for prompt in load(*rows).prompts] == ["4", None, None, 0]
    with pytest.raises(DataError) as caught:
        load(*rows, needs_label=True)
    assert str(caught.value).count("no label, which the reward needs") == 2
    assert "prompts.jsonl:2: no label" in str(caught.value)


def test_long_prompts_are_errors_or_left_out(load: Callable[..., PromptSet]) -> None:
    rows = [GOOD, {"prompt": "x" * 200}, {"prompt": "y" * 91}, {"prompt": "y" * 90}]
    lengths = [len(prompt.ids) for prompt in load(*rows, max_prompt_tokens=300).prompts]
    fitting = load(*rows, max_prompt_tokens=lengths[3], too_long="skip")
    assert [len(prompt.ids) for prompt in fitting.prompts] == [lengths[0], lengths[3]]
    assert fitting.num_skipped == 2
    with pytest.raises(DataError) as caught:
        load(*rows, max_prompt_tokens=lengths[3])
    message = str(caught.value)
    assert "prompts that are too long: 2\n" in message
    assert f"prompts.jsonl:2: {lengths[1]} tokens, more than {lengths[3]}" in message
    assert "prompts.jsonl:3: " in message and "prompts.jsonl:4" not in message


def test_nothing_left_is_an_error(load: Callable[..., PromptSet]) -> None:
    with pytest.raises(DataError, match="no prompt is left"):
        load(GOOD, max_prompt_tokens=3, too_long="skip")
    with pytest.raises(DataError, match="no prompts in the data"):
        load(b"")


def test_tokens_that_the_model_does_not_have(load: Callable[..., PromptSet]) -> None:
    with pytest.raises(DataError, match=r"prompts.jsonl:1: (.|\n)*below vocab_size = 258"):
        load(GOOD, vocab_size=258)


def test_a_template_without_a_generation_prompt(load: Callable[..., PromptSet]) -> None:
    silent = CHATML.split("{% if add_generation_prompt %}")[0]
    with pytest.raises(DataError, match=r"prompts.jsonl:1: the chat template has no generation"):
        load(GOOD, template=silent)


def test_max_samples(load: Callable[..., PromptSet]) -> None:
    assert len(load(GOOD, GOOD, b"{", max_samples=2).prompts) == 2


def test_parquet_gives_what_jsonl_gives(tmp_path: Path) -> None:
    rows = [
        {"prompt": None, "messages": [USER], "label": "4", "level": 1},
        {"prompt": "x", "messages": None, "label": None, "level": 2},
    ]
    path = tmp_path / "prompts.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    found = list(iter_questions([path], needs_label=False))
    expected = list(iter_questions([write(tmp_path, *rows)], needs_label=False))
    assert [q.source for q in found] == [f"{path}:row 1", f"{path}:row 2"]
    for one, other in zip(found, expected, strict=True):
        assert (one.asked, one.tools, one.label) == (other.asked, other.tools, other.label)
        assert one.row == other.row


def test_parquet_without_a_question(tmp_path: Path) -> None:
    path = tmp_path / "prompts.parquet"
    pq.write_table(pa.table({"text": ["x"]}), path)
    with pytest.raises(DataError, match="no column prompt or messages"):
        list(iter_questions([path], needs_label=False))


def test_every_epoch_takes_each_prompt_once_in_an_order_of_its_own(
    load: Callable[..., PromptSet],
) -> None:
    prompts = load(*[{"prompt": f"q{i}"} for i in range(7)]).prompts
    order = BatchOrder(len(prompts), 3, seed=5, shuffle=True)
    drawn = [row for step in range(7) for row in order.rows(step)]
    epochs = [drawn[start : start + 7] for start in (0, 7, 14)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert epochs[0] != epochs[1]
    assert order.rows(4) == BatchOrder(7, 3, seed=5, shuffle=True).rows(4)
