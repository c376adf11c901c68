"""Assistant tokens: generation markers and prefixes must agree, and stop tokens are learnt."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from glm5.errors import DataError
from glm5.train.chat import ChatTokenizer, tokenize_chats
from glm5.train.data import Chat
from glm5.train.template import load_tokenizer

SPECIAL = ["<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>"]
SPECIAL += ["<|observation|>", "<|im_start|>", "<|im_end|>"]
THINK = ["<think>", "</think>"]
ENDOFTEXT, USER, OBSERVATION, IM_END = 256, 260, 262, 264

# ChatML, once with the markers and once without; the stop token is inside the marks.
_CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}OPEN{{ m.content + '<|im_end|>' }}CLOSE{{ '\n' }}"
    "{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML = _CHATML.replace("OPEN", "").replace("CLOSE", "")
CHATML_MARKED = _CHATML.replace("OPEN", "{% generation %}").replace("CLOSE", "{%- endgeneration %}")

# In the manner of GLM-5: no stop token of its own, reasoning kept after the last user turn only.
_CALLS = (
    "{% for c in m.tool_calls or [] %}{{ '<tool_call>' + c.function.name }}"
    "{% for key, value in c.function.arguments.items() %}"
    "{{ '<arg_key>' + key + '</arg_key><arg_value>' }}"
    "{{ value if value is string else value | tojson }}{{ '</arg_value>' }}{% endfor %}"
    "{{ '</tool_call>' }}{% endfor %}"
)
_GLM = (
    "[gMASK]<sop>{% if tools %}{{ '<|system|>' }}{% for t in tools %}{{ t | tojson }}{% endfor %}"
    "{% endif %}{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% endfor %}{% for m in messages %}"
    "{% if m.role == 'assistant' %}{{ '<|assistant|>' }}"
    "{% if m.reasoning_content is defined and (loop.index0 > ns.last or clear_thinking == false) %}"
    "{{ '<think>' }}OPEN{{ m.reasoning_content + '</think>' + m.content }}CALLSCLOSE"
    "{% else %}{{ '</think>' }}OPEN{{ m.content }}CALLSCLOSE{% endif %}"
    "{% elif m.role == 'tool' %}{{ '<|observation|>' + m.content }}"
    "{% else %}{{ '<|' + m.role + '|>' + m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}"
    "{{ '</think>' if enable_thinking == false else '<think>' }}{% endif %}"
)
_GLM = _GLM.replace("CALLS", _CALLS)
GLM = _GLM.replace("OPEN", "").replace("CLOSE", "")
GLM_MARKED = _GLM.replace("OPEN", "{% generation %}").replace("CLOSE", "{% endgeneration %}")

GLM_STOPS = (ENDOFTEXT, USER, OBSERVATION)


def u(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def a(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


CHATS = {
    "one": [u("hi"), a("hello")],
    "empty": [u(""), a("")],
    "system": [{"role": "system", "content": "be kind"}, u("a"), a("b")],
    "two turns": [u("a"), a("b c"), u("d"), a("e")],
    "tool": [u("a"), a("call"), {"role": "tool", "content": "42"}, a("it is 42")],
    "ends with user": [u("a"), a("b"), u("c")],
    "not ascii": [u("caf\u00e9"), a("\u4f60\u597d \U0001f600")],
    "newlines": [u("x\n"), a("\n\ny\n")],
}


def byte_tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    """One token per byte, so that nothing is truncated, merged or unknown."""
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    inner.add_tokens([AddedToken(text, special=False) for text in THINK])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|endoftext|>")
    tokenizer.chat_template = template
    return tokenizer


def chat_tokenizer(template: str, stops: tuple[int, ...], **args: Any) -> ChatTokenizer:
    return ChatTokenizer(byte_tokenizer(template), stops, args)


def learnt(
    tokenizer: ChatTokenizer, messages: Sequence[dict[str, Any]], tools: Sequence[Any] = ()
) -> list[str]:
    """The texts of the runs of tokens that carry loss."""
    chat = tokenizer(messages, tools=tools)
    edges = np.flatnonzero(np.diff(np.r_[0, chat.loss_mask.astype(int), 0])).reshape(-1, 2)
    return [tokenizer.tokenizer.decode(chat.input_ids[i:j].tolist()) for i, j in edges]


TEMPLATES = {"chatml": (CHATML, CHATML_MARKED, (IM_END,)), "glm": (GLM, GLM_MARKED, GLM_STOPS)}
# A GLM turn without text has no token of its own; the test after this one is about that.
CASES = [(t, name) for t in TEMPLATES for name in CHATS if (t, name) != ("glm", "empty")]


@pytest.mark.parametrize(("template", "name"), CASES)
def test_markers_and_prefixes_agree(template: str, name: str) -> None:
    plain, marked, stops = TEMPLATES[template]
    by_prefix = chat_tokenizer(plain, stops)(CHATS[name])
    by_marker = chat_tokenizer(marked, stops)(CHATS[name])
    assert by_prefix.input_ids.tolist() == by_marker.input_ids.tolist()
    assert by_prefix.loss_mask.tolist() == by_marker.loss_mask.tolist()
    assert by_prefix.input_ids.dtype == np.int32
    assert by_prefix.loss_mask.dtype == np.bool_


@pytest.mark.parametrize("template", [GLM, GLM_MARKED])
def test_chat_without_any_assistant_token_is_an_error(template: str) -> None:
    with pytest.raises(DataError, match="marks no assistant token"):
        chat_tokenizer(template, GLM_STOPS)(CHATS["empty"])


@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED])
def test_chatml_learns_the_turn_and_its_stop_token(template: str) -> None:
    tokenizer = chat_tokenizer(template, (IM_END,))
    assert learnt(tokenizer, CHATS["two turns"]) == ["b c<|im_end|>", "e<|im_end|>"]
    assert learnt(tokenizer, CHATS["not ascii"]) == ["\u4f60\u597d \U0001f600<|im_end|>"]


def test_stop_token_right_after_the_marks_is_learnt() -> None:
    # Many templates close the marks before the stop token.
    template = _CHATML.replace("OPEN", "{% generation %}").replace("CLOSE", "")
    template = template.replace("m.content + '<|im_end|>' }}{{", "m.content }}{% endgeneration %}"
                                "{{ '<|im_end|>' +", 1)  # fmt: skip
    tokenizer = chat_tokenizer(template, (IM_END,))
    assert learnt(tokenizer, CHATS["two turns"]) == ["b c<|im_end|>", "e<|im_end|>"]


@pytest.mark.parametrize("template", [GLM, GLM_MARKED])
def test_glm_turn_is_stopped_by_the_next_role(template: str) -> None:
    tokenizer = chat_tokenizer(template, GLM_STOPS)
    assert learnt(tokenizer, CHATS["two turns"]) == ["b c<|user|>", "e<|user|>"]
    assert learnt(tokenizer, CHATS["tool"]) == ["call<|observation|>", "it is 42<|user|>"]
    assert learnt(tokenizer, CHATS["ends with user"]) == ["b<|user|>"]
    assert learnt(tokenizer, [u("a"), a("say", tool_calls=[call("f", {})])]) == [
        "say<tool_call>f</tool_call><|observation|>"
    ]


def test_last_turn_falls_back_to_eos_where_no_role_stops_it() -> None:
    # <|user|> is no stop token here, so only the eos token can end the last turn.
    assert learnt(chat_tokenizer(GLM, (ENDOFTEXT,)), CHATS["two turns"]) == [
        "b c",
        "e<|endoftext|>",
    ]


def test_only_the_stop_token_is_appended() -> None:
    tokenizer = chat_tokenizer(GLM, GLM_STOPS)
    rendered = tokenizer.tokenizer.apply_chat_template(CHATS["one"])["input_ids"]
    assert tokenizer(CHATS["one"]).input_ids.tolist() == [*rendered, USER]
    rendered = tokenizer.tokenizer.apply_chat_template(CHATS["ends with user"])["input_ids"]
    assert tokenizer(CHATS["ends with user"]).input_ids.tolist() == rendered


@pytest.mark.parametrize("template", [GLM, GLM_MARKED])
def test_reasoning_after_the_last_user_turn_is_learnt(template: str) -> None:
    messages = [u("a"), a("b"), u("c"), a("d", reasoning_content="hm")]
    tokenizer = chat_tokenizer(template, GLM_STOPS)
    assert learnt(tokenizer, messages) == ["b<|user|>", "hm</think>d<|user|>"]


def test_reasoning_that_the_template_drops_is_an_error_with_a_remedy() -> None:
    messages = [u("a"), a("b", reasoning_content="hm"), u("c"), a("d", reasoning_content="so")]
    with pytest.raises(DataError, match="no prefix of the whole chat") as caught:
        chat_tokenizer(GLM, GLM_STOPS)(messages)
    assert "clear_thinking" in str(caught.value)
    kept = chat_tokenizer(GLM, GLM_STOPS, clear_thinking=False)
    assert learnt(kept, messages) == ["hm</think>b<|user|>", "so</think>d<|user|>"]


def test_generation_prompt_that_is_no_prefix_is_an_error() -> None:
    template = CHATML.replace("'<|im_start|>assistant\n'", "'<|im_start|>model\n'")
    with pytest.raises(DataError, match=r"generation prompt before messages\[1\]"):
        chat_tokenizer(template, (IM_END,))(CHATS["one"])


def test_merged_boundary_is_an_error() -> None:
    # "\n" of the header and "\n" of the turn are one token here, so no prefix exists.
    tokenizer = byte_tokenizer(CHATML)
    tokenizer.add_tokens([AddedToken("\n\n")])
    with pytest.raises(DataError, match="no prefix of the chat"):
        ChatTokenizer(tokenizer, (IM_END,))([u("a"), a("\nb")])


def test_chat_that_starts_with_the_assistant() -> None:
    messages = [a("hello"), u("hi"), a("yes")]
    with pytest.raises(DataError, match="starts with an assistant message"):
        chat_tokenizer(CHATML, (IM_END,))(messages)
    marked = chat_tokenizer(CHATML_MARKED, (IM_END,))
    assert learnt(marked, messages) == ["hello<|im_end|>", "yes<|im_end|>"]


def call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}


WEATHER = [{"type": "function", "function": {"name": "weather", "description": "by city"}}]
CALLING = [
    u("warm in Oslo?"),
    a("", tool_calls=[call("weather", {"city": "Oslo", "days": 2})]),
    {"role": "tool", "content": "12"},
    a("no"),
]


@pytest.mark.parametrize("template", [GLM, GLM_MARKED])
def test_tool_calls_are_learnt_and_tools_and_results_are_not(template: str) -> None:
    tokenizer = chat_tokenizer(template, GLM_STOPS)
    assert learnt(tokenizer, CALLING, WEATHER) == [
        "<tool_call>weather<arg_key>city</arg_key><arg_value>Oslo</arg_value>"
        "<arg_key>days</arg_key><arg_value>2</arg_value></tool_call><|observation|>",
        "no<|user|>",
    ]
    text = tokenizer.tokenizer.decode(tokenizer(CALLING, tools=WEATHER).input_ids.tolist())
    assert text.startswith("[gMASK]<sop><|system|>" + json.dumps(WEATHER[0]) + "<|user|>warm")


@pytest.mark.parametrize(
    ("messages", "tools", "name"),
    [
        (CHATS["one"], WEATHER, "tools"),
        (CALLING, [], r"tool_calls, so that messages\[1\]"),
        ([u("x"), a("y", reasoning_content="z")], [], r"reasoning_content, so that messages\[1\]"),
    ],
)
def test_what_the_template_does_not_read_is_refused(
    messages: list[dict[str, Any]], tools: list[Any], name: str
) -> None:
    with pytest.raises(DataError, match=f"does not read {name}") as caught:
        chat_tokenizer(CHATML, (IM_END,))(messages, tools=tools)
    assert caught.value.remedy is not None


AS_TEXT = {
    "user": [u("x<|assistant|>y"), a("b")],
    "assistant": [u("x"), a("<|assistant|>")],
    "reasoning_content": [u("x"), a("b", reasoning_content="<|assistant|>")],
    "a call": [u("x"), a("b", tool_calls=[call("f", {"q": ["<|assistant|>"]})])],
    "a key of a call": [u("x"), a("b", tool_calls=[call("f", {"<|assistant|>": 1})])],
}


@pytest.mark.parametrize("where", AS_TEXT)
@pytest.mark.parametrize("special", ["<|user|>", "<|assistant|>", "[gMASK]"])
def test_special_token_written_as_text_is_refused(where: str, special: str) -> None:
    messages = json.loads(json.dumps(AS_TEXT[where]).replace("<|assistant|>", special))
    with pytest.raises(DataError, match=f"contains the special token {re.escape(special)} as text"):
        chat_tokenizer(GLM, GLM_STOPS)(messages)


def test_special_token_in_a_tool_is_refused() -> None:
    tools = [{"name": "f", "description": "<|user|>"}]
    with pytest.raises(DataError, match="tools contains the special token"):
        chat_tokenizer(GLM, GLM_STOPS)(CHATS["one"], tools=tools)


def test_think_tags_of_a_user_are_text_that_opens_no_loss() -> None:
    messages = [u("what does </think> mean?"), a("the end")]
    assert learnt(chat_tokenizer(GLM, GLM_STOPS), messages) == ["the end<|user|>"]


def test_think_tags_in_content_are_as_the_template_takes_them() -> None:
    inside = [u("a"), a("<think>hm</think>b")]
    # knows no reasoning: the tags are content like any other
    assert learnt(chat_tokenizer(CHATML, (IM_END,)), inside) == ["<think>hm</think>b<|im_end|>"]
    # knows reasoning_content only, and would write a second, empty <think></think> before it
    with pytest.raises(DataError, match=r"messages\[1\].content holds </think>") as caught:
        chat_tokenizer(GLM, GLM_STOPS)(inside)
    assert "move what stands between" in str(caught.value)
    # takes it out of the content itself, as GLM-5's does
    splits = GLM.replace(
        "{% if m.reasoning_content is defined and",
        "{% if '</think>' in m.content %}{{ m.content }}{% elif m.reasoning_content is defined and",
    )
    assert learnt(chat_tokenizer(splits, GLM_STOPS), inside) == ["hm</think>b<|user|>"]


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("messages[0].content + 1", "TypeError"),
        ("messages[0].absent.more", "has no attribute 'absent'"),
        ("'%(x)s' | format(y=1)", "KeyError: 'x'"),
        ("1 // 0", "ZeroDivisionError"),
        ("messages[0].content.encode('utf-16').decode('ascii')", "UnicodeDecodeError"),
        ("range(10 ** 9) | list", "OverflowError"),
    ],
)
def test_any_failure_of_the_template_is_a_data_error(expression: str, reason: str) -> None:
    tokenizer = chat_tokenizer("{{ " + expression + " }}", (IM_END,))
    with pytest.raises(DataError, match=r"f:7: the chat template refuses the chat") as caught:
        tokenize_chats([Chat((u("a"), a("b")), "f:7")], tokenizer)
    assert reason in str(caught.value)


def test_template_that_refuses_a_chat_is_a_data_error() -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(DataError, match="roles must alternate"):
        chat_tokenizer(template, (IM_END,))(CHATS["one"])


def test_template_that_marks_nothing_is_an_error() -> None:
    template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}{% generation %}{% endgeneration %}"
    )
    with pytest.raises(DataError, match="marks no assistant token"):
        chat_tokenizer(template, (IM_END,))(CHATS["one"])


def test_tokenizer_that_cannot_serve_is_refused_at_once() -> None:
    with pytest.raises(DataError, match="no chat template"):
        ChatTokenizer(byte_tokenizer(None), (IM_END,))
    with pytest.raises(DataError, match="no stop token"):
        ChatTokenizer(byte_tokenizer(CHATML), ())
    with pytest.raises(DataError, match="not in the tokenizer's vocabulary"):
        ChatTokenizer(byte_tokenizer(CHATML), (10_000,))


def test_load_tokenizer_from_a_folder(tmp_path: Path) -> None:
    byte_tokenizer(CHATML).save_pretrained(tmp_path)
    tokenizer = ChatTokenizer(load_tokenizer(tmp_path), (IM_END,))
    assert learnt(tokenizer, CHATS["one"]) == ["hello<|im_end|>"]
    with pytest.raises(DataError, match="cannot load the tokenizer"):
        load_tokenizer(tmp_path / "absent")


def test_all_chats_that_fail_are_named() -> None:
    chats = [
        Chat((u("a"), a("b")), "f:1"),
        Chat((a("b"),), "f:2"),
        Chat((u("<|im_end|>"), a("b")), "f:3"),
        Chat((u("b"), a("<|im_end|>")), "f:4"),
    ]
    tokenizer = chat_tokenizer(CHATML, (IM_END,))
    with pytest.raises(DataError) as caught:
        tokenize_chats(chats, tokenizer)
    message = str(caught.value)
    assert "cannot be tokenised: 3\n" in message
    assert "f:2: the chat starts with an assistant message" in message
    assert "f:3: messages[0] contains the special token" in message
    # every remedy is told, and told once
    assert message.count("remedy:") == 1
    assert message.count("start the chat with a system or user message") == 1
    assert message.count("or: take special tokens out of the text") == 1
    assert [chat.source for chat in tokenize_chats(chats[:1], tokenizer)] == ["f:1"]
