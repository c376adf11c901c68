"""Reading chats: good rows pass, and every bad one is named with its place."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from glm5.errors import DataError
from glm5.train.data import MAX_SHOWN_PROBLEMS, Chat, Problems, iter_chats

USER = {"role": "user", "content": "2+2?"}
ASSISTANT = {"role": "assistant", "content": "4"}
GOOD = {"messages": [USER, ASSISTANT]}


def calling(calls: object) -> dict[str, Any]:
    return {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": calls}]}


def jsonl(folder: Path, *lines: object, name: str = "chats.jsonl") -> Path:
    path = folder / name
    encoded = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    path.write_bytes(b"\n".join(encoded))
    return path


def failure(*paths: Path) -> str:
    with pytest.raises(DataError) as caught:
        list(iter_chats(paths))
    return str(caught.value)


def test_good_rows_keep_order_place_and_message_keys(tmp_path: Path) -> None:
    thoughtful = {"messages": [USER, {**ASSISTANT, "reasoning_content": "easy"}], "id": 7}
    path = jsonl(tmp_path, GOOD, b"", b"  \r", thoughtful)
    chats = list(iter_chats([path]))
    assert [chat.source for chat in chats] == [f"{path}:1", f"{path}:4"]
    assert chats[0].messages == (USER, ASSISTANT)
    assert chats[1].messages[1]["reasoning_content"] == "easy"


def test_all_roles_and_empty_content_are_good(tmp_path: Path) -> None:
    roles = ["system", "user", "assistant", "tool", "assistant"]
    row = {"messages": [{"role": role, "content": ""} for role in roles]}
    assert len(list(iter_chats([jsonl(tmp_path, row)]))) == 1


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{not json}", "invalid JSON"),
        (b'{"messages": [', "invalid JSON"),
        (b"[" * 100_000, "unreadable"),
        (b'{"a": "\xff"}', "invalid UTF-8 at byte 7"),
        ([GOOD], "not an object but a list"),
        (b"null", "not an object but null"),
        (b"3", "not an object but a number"),
        ({}, "no messages"),
        ({"messages": None}, "no messages"),
        ({"messages": "hello"}, "messages is not a list but a string"),
        ({"messages": []}, "messages is empty"),
        ({"messages": ["hello"]}, "messages[0] is not an object but a string"),
        ({"messages": [USER, {"role": "bot", "content": ""}]}, "messages[1].role is 'bot'"),
        ({"messages": [{"content": ""}]}, "messages[0].role is None"),
        ({"messages": [{"role": ["user"], "content": ""}]}, "messages[0].role is ['user']"),
        ({"messages": [USER, {"role": "assistant"}]}, "content is not a string but null"),
        ({"messages": [{"role": "user", "content": [USER]}]}, "not a string but a list"),
        ({"messages": [USER]}, "no assistant message"),
        (
            b'{"messages": [{"role": "assistant", "content": "\\ud800"}]}',
            "half of a surrogate pair",
        ),
        (
            b'{"messages": [{"role": "assistant", "content": "", "reasoning_content": "\\udfff"}]}',
            "messages[0] has half of a surrogate pair",
        ),
        (b'{"messages": [], "messages": [1]}', "the key 'messages' stands twice in one object"),
        (b'{"messages": [{"role": "user", "role": "assistant"}]}', "the key 'role' stands twice"),
        (b'{"messages": [], "weight": NaN}', "NaN is no JSON number"),
        (json.dumps(GOOD).encode("utf-16"), "invalid UTF-8 at byte 0"),
        ({**GOOD, "tools": {"name": "f"}}, "tools is not a list but an object"),
        ({**GOOD, "tools": ["f"]}, "tools[0] is not an object but a string"),
        ({**GOOD, "tools": "[{]"}, "tools: invalid JSON"),
        (
            {"messages": [USER, {"role": "assistant", "content": None}]},
            "messages[1].content is not a string but null",
        ),
        (
            {"messages": [USER, {**ASSISTANT, "reasoning_content": ["hm"]}]},
            "messages[1].reasoning_content is not a string but a list",
        ),
        ({"messages": [{**USER, "tool_calls": [1]}, ASSISTANT]}, "only an assistant calls tools"),
        (calling("f"), "tool_calls is not a list but a string"),
        (calling(["f"]), "messages[1].tool_calls[0] is not an object but a string"),
        (calling([{"id": "c1"}]), "messages[1].tool_calls[0].name is None"),
        (calling([{"function": {"name": ""}}]), "tool_calls[0].function.name is ''"),
        (
            calling([{"function": {"name": "f", "arguments": "{city}"}}]),
            "messages[1].tool_calls[0].function.arguments: invalid JSON",
        ),
        (
            calling([{"function": {"name": "f", "arguments": '{"a": 1, "a": 2}'}}]),
            "arguments: the key 'a' stands twice",
        ),
        (
            calling([{"function": {"name": "f", "arguments": [1]}}]),
            "tool_calls[0].function.arguments is not an object but a list",
        ),
    ],
)
def test_bad_line_is_named(tmp_path: Path, line: object, reason: str) -> None:
    path = jsonl(tmp_path, GOOD, line, GOOD)
    message = failure(path)
    assert "bad rows in the data: 1\n" in message
    assert f"{path}:2: " in message
    assert reason in message


CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": [1, null]}'}}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"default": None}}}]


def test_calls_of_an_api_are_put_as_templates_take_them(tmp_path: Path) -> None:
    row = {**calling([CALL]), "tools": TOOLS}
    (chat,) = iter_chats([jsonl(tmp_path, row)])
    function = {"name": "f", "arguments": {"x": [1, None]}}
    assert chat.messages[1] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{**CALL, "function": function}],
    }
    assert chat.tools == tuple(TOOLS)


@pytest.mark.parametrize("arguments", [{}, "", "{}", None])
def test_a_call_may_be_flat_and_without_arguments(tmp_path: Path, arguments: object) -> None:
    row = calling([{"name": "f", "arguments": arguments}])
    (chat,) = iter_chats([jsonl(tmp_path, row)])
    assert chat.messages[1]["tool_calls"] == [{"name": "f", "arguments": {}}]


@pytest.mark.parametrize("nothing", [None, []])
def test_nulls_and_no_calls_are_as_if_absent(tmp_path: Path, nothing: object) -> None:
    row = {"messages": [USER, {**ASSISTANT, "tool_calls": nothing, "name": None}], "tools": nothing}
    (chat,) = iter_chats([jsonl(tmp_path, row)])
    assert chat.messages == (USER, ASSISTANT)
    assert chat.tools == ()


@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS)])
def test_tools_are_a_list_or_its_json(tmp_path: Path, tools: object) -> None:
    (chat,) = iter_chats([jsonl(tmp_path, {**GOOD, "tools": tools})])
    assert chat.tools == tuple(TOOLS)


def test_byte_order_mark_and_carriage_returns_are_no_text(tmp_path: Path) -> None:
    line = json.dumps(GOOD).encode()
    path = jsonl(tmp_path, b"\xef\xbb\xbf" + line + b"\r", line + b"\r", b"\xef\xbb\xbf" + line)
    chats = iter_chats([path])
    assert [next(chats).messages for _ in range(2)] == [(USER, ASSISTANT)] * 2
    # in the middle of a file it is no mark
    with pytest.raises(DataError, match=f"{path}:3: invalid JSON: Unexpected UTF-8 BOM"):
        next(chats)


def test_good_rows_come_before_the_error(tmp_path: Path) -> None:
    chats = iter_chats([jsonl(tmp_path, b"{", GOOD)])
    assert next(chats).messages == (USER, ASSISTANT)
    with pytest.raises(DataError):
        next(chats)


def test_bad_lines_of_all_files_are_told_together(tmp_path: Path) -> None:
    first = jsonl(tmp_path, b"{", GOOD, b"}", name="a.jsonl")
    second = jsonl(tmp_path, GOOD, {}, name="b.jsonl")
    message = failure(first, second)
    assert "bad rows in the data: 3\n" in message
    assert all(place in message for place in (f"{first}:1", f"{first}:3", f"{second}:2"))
    assert f"{first}:2" not in message


@pytest.mark.parametrize("num_bad", [MAX_SHOWN_PROBLEMS, MAX_SHOWN_PROBLEMS + 1, 500])
def test_list_of_bad_lines_is_capped_and_counted(tmp_path: Path, num_bad: int) -> None:
    message = failure(jsonl(tmp_path, *[{} for _ in range(num_bad)]))
    assert f"bad rows in the data: {num_bad}\n" in message
    assert message.count("no messages") == MAX_SHOWN_PROBLEMS
    hidden = num_bad - MAX_SHOWN_PROBLEMS
    assert (f"... and {hidden} more" in message) == (hidden > 0)


def test_max_samples_stops_before_later_lines(tmp_path: Path) -> None:
    path = jsonl(tmp_path, GOOD, GOOD, b"{")
    assert len(list(iter_chats([path], max_samples=1))) == 1
    assert len(list(iter_chats([path], max_samples=2))) == 2
    with pytest.raises(DataError):
        list(iter_chats([path], max_samples=3))


def test_missing_empty_and_unknown_files(tmp_path: Path) -> None:
    assert "no such data file" in failure(tmp_path / "absent.jsonl")
    (tmp_path / "folder.jsonl").mkdir()
    assert "no such data file" in failure(tmp_path / "folder.jsonl")
    assert "no chats in the data" in failure(jsonl(tmp_path))
    assert "unknown kind" in failure(jsonl(tmp_path, GOOD, name="chats.csv"))


def parquet(folder: Path, messages: list[Any], column: str = "messages", **more: Any) -> Path:
    path = folder / "chats.parquet"
    # the other columns stand before the messages
    pq.write_table(pa.table({**more, "id": list(range(len(messages))), column: messages}), path)
    return path


def test_parquet_gives_the_same_messages_as_jsonl(tmp_path: Path) -> None:
    # A struct column fills absent keys with null, which must not reach the template.
    rows = [[USER, ASSISTANT], [USER, {**ASSISTANT, "reasoning_content": "easy"}]] * 200
    path = parquet(tmp_path, rows)
    chats = list(iter_chats([path]))
    assert [list(chat.messages) for chat in chats] == rows
    assert chats[0].source == f"{path}:row 1"
    assert chats[-1].source == f"{path}:row 400"


def test_parquet_names_bad_rows(tmp_path: Path) -> None:
    path = parquet(tmp_path, [[USER, ASSISTANT], None, [], [USER]])
    message = failure(path)
    assert "bad rows in the data: 3\n" in message
    assert f"{path}:row 2: no messages" in message
    assert f"{path}:row 3: messages is empty" in message
    assert f"{path}:row 4: no assistant message" in message


def test_parquet_gives_tools_and_calls_and_names_bad_ones(tmp_path: Path) -> None:
    messages = calling([CALL])["messages"]
    path = parquet(tmp_path, [messages, [USER, ASSISTANT]], tools=[json.dumps(TOOLS), None])
    called, plain = iter_chats([path])
    assert called.tools == tuple(TOOLS)
    assert called.messages[1]["content"] == ""
    assert called.messages[1]["tool_calls"][0]["function"]["arguments"] == {"x": [1, None]}
    assert plain == Chat((USER, ASSISTANT), f"{path}:row 2")

    bad = {**CALL, "function": {"name": "f", "arguments": "{"}}
    rows = [[USER, ASSISTANT], calling([bad])["messages"], [USER, ASSISTANT]]
    message = failure(parquet(tmp_path, rows, tools=["[]", "[]", "7"]))
    assert f"{path}:row 2: messages[1].tool_calls[0].function.arguments: invalid JSON" in message
    assert f"{path}:row 3: tools is not a list but a number" in message


def test_parquet_with_bytes_that_are_no_text(tmp_path: Path) -> None:
    bad = pa.array([b"\xff"]).cast(pa.binary()).view(pa.string())
    struct = pa.StructArray.from_arrays([pa.array(["assistant"]), bad], ["role", "content"])
    path = tmp_path / "chats.parquet"
    pq.write_table(pa.table({"messages": pa.ListArray.from_arrays([0, 1], struct)}), path)
    assert f"{path}:row 1: invalid UTF-8" in failure(path)


def test_parquet_without_the_column_or_not_parquet(tmp_path: Path) -> None:
    assert "no column messages" in failure(parquet(tmp_path, [[USER]], column="chat"))
    (tmp_path / "fake.parquet").write_bytes(b"hello")
    assert "not a readable Parquet file" in failure(tmp_path / "fake.parquet")


def test_no_problems_raise_nothing() -> None:
    Problems().raise_if_any("nothing")
