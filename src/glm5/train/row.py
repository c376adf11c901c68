"""What one row of the data must look like, and the form in which a chat template takes it."""

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

ROLES = ("system", "user", "assistant", "tool")


class BadRow(Exception):
    """Why one row cannot be used."""


def parse_json(text: str) -> Any:
    """Strict JSON: a key given twice, NaN and Infinity are errors as well.

    Raises:
        BadRow: what is wrong, and where in the text.
    """
    try:
        return json.loads(text, object_pairs_hook=_object, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise BadRow(f"invalid JSON: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:
        raise BadRow(f"unreadable: {error}") from None


def messages_of(row: Any) -> tuple[dict[str, Any], ...]:
    """The messages of a chat to learn from, checked, with calls and content as templates take them.

    Raises:
        BadRow: what is wrong, and in which message.
    """
    messages = _as_object(row).get("messages")
    if messages is None:
        raise BadRow("no messages")
    checked = _messages(messages, "messages")
    if all(message["role"] != "assistant" for message in checked):
        raise BadRow("no assistant message, so there is nothing to learn")
    return checked


def question_of(row: Any) -> str | tuple[dict[str, Any], ...]:
    """What a row asks: `prompt`, a string, or messages, in `messages` or in `prompt` as well.

    Raises:
        BadRow: neither or both are there, or what is wrong in them; or an assistant has the last
            word.
    """
    given = {name: _as_object(row).get(name) for name in ("prompt", "messages")}
    given = {name: value for name, value in given.items() if value is not None}
    if len(given) != 1:
        raise BadRow("both prompt and messages" if given else "no prompt and no messages")
    ((name, asked),) = given.items()
    if name == "prompt" and isinstance(asked, str):
        if not asked.strip():
            raise BadRow("prompt is empty")
        _check_text(asked, "prompt")
        return asked
    if name == "prompt" and not isinstance(asked, list):
        raise BadRow(f"prompt is not a string or a list but {_kind(asked)}")
    checked = _messages(asked, name)
    if checked[-1]["role"] == "assistant":
        raise BadRow(f"the last of {name} is an assistant's, so that nothing is asked")
    return checked


def label_of(row: Mapping[str, Any]) -> str | int | float | None:
    """The answer that a reward compares with; None where the row has none.

    Raises:
        BadRow: neither a string nor a finite number.
    """
    label = row.get("label")
    if isinstance(label, str):
        _check_text(label, "label")
        return label
    is_number = isinstance(label, int | float) and not isinstance(label, bool)
    if label is not None and not is_number:
        raise BadRow(f"label is not a string or a number but {_kind(label)}")
    if isinstance(label, float) and not math.isfinite(label):
        raise BadRow(f"label is {label}, which is no number")
    return label


def tools_of(row: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    """The functions that a row offers the assistant: a list of objects, or its JSON as a string.

    Raises:
        BadRow: what is wrong, and in which tool.
    """
    tools = _maybe_json(row.get("tools"), "tools")
    if tools is None:
        return ()
    if not isinstance(tools, list):
        raise BadRow(f"tools is not a list but {_kind(tools)}")
    for index, tool in enumerate(tools):
        if not isinstance(tool, dict):
            raise BadRow(f"tools[{index}] is not an object but {_kind(tool)}")
    _check_text(tools, "tools")
    return tuple(tools)


def strings(value: Any) -> Iterator[str]:
    """Every string inside nested values, the keys of objects too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from strings(key)
            yield from strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from strings(item)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise BadRow(f"the key {twice!r} stands twice in one object")
    return made


def _refuse_constant(name: str) -> None:
    raise BadRow(f"invalid JSON: {name} is no JSON number")


def _as_object(row: Any) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise BadRow(f"not an object but {_kind(row)}")
    return row


def _messages(messages: Any, name: str) -> tuple[dict[str, Any], ...]:
    if not isinstance(messages, list):
        raise BadRow(f"{name} is not a list but {_kind(messages)}")
    if not messages:
        raise BadRow(f"{name} is empty")
    return tuple(_message(message, f"{name}[{index}]") for index, message in enumerate(messages))


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise BadRow(f"{where} is not an object but {_kind(message)}")
    role = message.get("role")
    if role not in ROLES:
        raise BadRow(f"{where}.role is {role!r}, expected one of {', '.join(ROLES)}")
    # templates differ on null: some print "None", so it is as if the key were absent
    kept = {key: value for key, value in message.items() if value is not None}
    calls = kept.pop("tool_calls", None)
    if calls:
        if role != "assistant":
            raise BadRow(f"{where}.tool_calls: only an assistant calls tools, not a {role}")
        kept["tool_calls"] = _tool_calls(calls, f"{where}.tool_calls")
        # what comes from an API has content null beside calls; templates add it to other strings
        kept.setdefault("content", "")
    if not isinstance(kept.get("content"), str):
        raise BadRow(f"{where}.content is not a string but {_kind(kept.get('content'))}")
    if not isinstance(kept.get("reasoning_content", ""), str):
        raise BadRow(
            f"{where}.reasoning_content is not a string but {_kind(kept['reasoning_content'])}"
        )
    _check_text(kept, where)
    return kept


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise BadRow(f"{where} is not a list but {_kind(calls)}")
    return [_tool_call(call, f"{where}[{index}]") for index, call in enumerate(calls)]


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    """The call with its arguments as an object: APIs give a string, templates iterate over them."""
    if not isinstance(call, dict):
        raise BadRow(f"{where} is not an object but {_kind(call)}")
    function, inside = _function_of(call, where)
    arguments = function.get("arguments")
    # a call without arguments has null or an empty string there
    arguments = _maybe_json("{}" if arguments in (None, "") else arguments, f"{inside}.arguments")
    if not isinstance(arguments, dict):
        raise BadRow(f"{inside}.arguments is not an object but {_kind(arguments)}")
    called = {**function, "arguments": arguments}
    return called if function is call else {**call, "function": called}


def _function_of(value: dict[str, Any], where: str) -> tuple[dict[str, Any], str]:
    """The object with the function's name: the value itself, or its `function`."""
    function = value.get("function", value)
    where = f"{where}.function" if "function" in value else where
    if not isinstance(function, dict):
        raise BadRow(f"{where} is not an object but {_kind(function)}")
    if not (isinstance(function.get("name"), str) and function["name"]):
        raise BadRow(f"{where}.name is {function.get('name')!r}, expected the function's name")
    return function, where


def _maybe_json(value: Any, where: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value)
    except BadRow as error:
        raise BadRow(f"{where}: {error}") from None


def _check_text(value: Any, where: str) -> None:
    for text in strings(value):
        if not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text):
            raise BadRow(f"{where} has half of a surrogate pair, which is not text")


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    names |= {int: "a number", float: "a number", type(None): "null"}
    return names.get(type(value), type(value).__name__)
