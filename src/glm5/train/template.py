"""A tokenizer's chat template: what it takes, what it reads, and its errors as the user's."""

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glm5.errors import DataError
from glm5.train.row import strings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Arguments of apply_chat_template itself: as template variables they would change what it returns.
RESERVED_ARGS = (
    "conversation",
    "messages",
    "tools",
    "documents",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "tokenize",
    "sanitize_control_tokens",
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
    "tokenizer_kwargs",
)

_GENERATION_MARKER = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


def load_tokenizer(path: str | Path) -> "PreTrainedTokenizerBase":
    """Load the tokenizer of a Hugging Face folder or repo id, without running code of its own.

    Raises:
        DataError: no tokenizer there.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            str(path), trust_remote_code=False
        )
    except Exception as error:  # whatever a config or tokenizer file of another kind provokes
        raise DataError(f"{path}: cannot load the tokenizer", got=error) from error
    return tokenizer


class ChatTemplate:
    """Turns messages and tools into tokens, and refuses what would be lost or misread."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        stop_texts: Sequence[str],
        variables: Mapping[str, Any],
    ) -> None:
        """Take a tokenizer, the texts of the model's stop tokens, and template variables.

        Raises:
            DataError: the tokenizer has no chat template.
        """
        self._tokenizer = tokenizer
        self._variables = dict(variables)
        added = tokenizer.added_tokens_decoder.values()
        special = (token.content for token in added if token.special)
        self._special_texts = sorted({*stop_texts, *tokenizer.all_special_tokens, *special})
        self._source(())

    def has_markers(self, tools: Sequence[Mapping[str, Any]]) -> bool:
        """Whether the template says itself which text the assistant generated."""
        return bool(_GENERATION_MARKER.search(self._source(tools)))

    def apply(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        **args: Any,
    ) -> Any:
        """Return what apply_chat_template does: a mapping with `input_ids`, a list of t ids.

        Raises:
            DataError: the template fails on the chat.
        """
        from jinja2.exceptions import TemplateError

        try:
            return self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] or None,
                tokenize=True,
                return_dict=True,
                **{**self._variables, **args},
            )
        except TemplateError as error:
            raise DataError(f"the chat template refuses the chat: {error}") from None
        except Exception as error:  # a template is a program, and the row is its input
            reason = f"{type(error).__name__}: {error}"
            raise DataError(f"the chat template refuses the chat: {reason}") from None

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        **args: Any,
    ) -> list[int]:
        """Return the ids [t] of the rendered chat; raises as `apply`."""
        return list(self.apply(messages, tools, **args)["input_ids"])

    def check(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> None:
        """Refuse text that would become a control token, and what the template would not show.

        Raises:
            DataError: a special token written as text, a part of the chat that the template does
                not read, or reasoning inside the content that it would not recognise.
        """
        if tools:
            self._check_is_read("tools", tools, "tools")
            self._check_text(tools, "tools")
        for index, message in enumerate(messages):
            where = f"messages[{index}]"
            for key in ("tool_calls", "reasoning_content"):
                if message.get(key):
                    self._check_is_read(key, tools, f"{where}.{key}")
            self._check_text(message, where)
            if message["role"] == "assistant":
                self._check_reasoning(message, where)

    def _source(self, tools: Sequence[Mapping[str, Any]]) -> str:
        try:
            # a tokenizer may have a template of its own for chats with tools
            return str(self._tokenizer.get_chat_template(tools=list(tools) or None))
        except ValueError as error:
            raise DataError("the tokenizer has no chat template", got=error) from None

    def _check_is_read(self, name: str, tools: Sequence[Mapping[str, Any]], where: str) -> None:
        if re.search(rf"\b{name}\b", self._source(tools)) is None:
            raise DataError(
                f"the chat template does not read {name}, so that {where} would be lost",
                remedy=f"use a tokenizer whose chat template reads {name}, or take {name} out",
            )

    def _check_text(self, value: Any, where: str) -> None:
        for text in strings(value):
            for special in self._special_texts:
                if special in text:
                    raise DataError(
                        f"{where} contains the special token {special} as text",
                        remedy="take special tokens out of the text, the chat template writes "
                        "them: they would act as control tokens",
                    )

    def _check_reasoning(self, message: Mapping[str, Any], where: str) -> None:
        inside = "</think>" in message["content"]
        if inside and self._is_reasoning_apart:
            raise DataError(
                f"{where}.content holds </think>: this chat template takes reasoning in "
                "reasoning_content alone and would open an empty one before it",
                remedy="move what stands between <think> and </think> to reasoning_content",
            )

    @cached_property
    def _is_reasoning_apart(self) -> bool:
        """Whether the template knows reasoning, but not when it stands in the content."""
        if "reasoning_content" not in self._source(()):
            return False
        question = {"role": "user", "content": "x"}
        apart = {"role": "assistant", "content": "y", "reasoning_content": "z"}
        inside = {"role": "assistant", "content": "<think>z</think>y"}
        return self.encode([question, apart]) != self.encode([question, inside])
