"""Turn chats into tokens, and mark the tokens that an assistant would have produced."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from glm5.errors import DataError
from glm5.train.data import Chat, Problems
from glm5.train.template import ChatTemplate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The prompts that serving may have used before an assistant turn, in the order they are tried.
_PROMPT_ARGS: tuple[dict[str, Any], ...] = ({}, {"enable_thinking": False})


@dataclass(frozen=True)
class TokenizedChat:
    """One chat in tokens.

    input_ids: [t] int32.
    loss_mask: [t] bool; True where the token itself is an assistant's, so it is not shifted.
    source: `file:line` of the chat.
    """

    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    source: str

    def __len__(self) -> int:
        return len(self.input_ids)


class ChatTokenizer:
    """Applies a tokenizer's chat template and finds the assistant's tokens.

    A template with generation markers tells them itself. Without, the tokens of an assistant
    turn are those that its generation prompt lacks: both must be true prefixes of the whole chat.

    The stop token always belongs to the loss, else a model never learns to end its turn. GLM
    templates write none: the role token of the next message stops the turn, so that one is
    marked, and a chat that ends with an assistant turn gets the token that would come next.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        stop_token_ids: Sequence[int],
        template_args: Mapping[str, Any] | None = None,
    ) -> None:
        """Take a tokenizer, the model's eos_token_id list, and variables for its template.

        Raises:
            DataError: no chat template, or no stop token.
        """
        self.tokenizer = tokenizer
        self.stop_token_ids = frozenset(stop_token_ids)
        if not self.stop_token_ids:
            raise DataError("no stop token", expected="at least one id in eos_token_id")
        self._template = ChatTemplate(tokenizer, self._texts_of_stop_tokens(), template_args or {})

    def __call__(
        self,
        messages: Sequence[Mapping[str, Any]],
        source: str = "chat",
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> TokenizedChat:
        """Return the tokens of one chat and the mask of those that an assistant produced.

        Raises:
            DataError: the template refuses the chat, does not read what it holds, changes earlier
                turns, or marks nothing; or the chat's text contains a special token.
        """
        self._template.check(messages, tools)
        marked = self._template.has_markers(tools)
        find = self._masked_by_template if marked else self._masked_by_prefixes
        input_ids, loss_mask = find(messages, tools)
        self._settle_stop_tokens(input_ids, loss_mask, messages)
        # The first token of a chat is never predicted.
        if not any(loss_mask[1:]):
            raise DataError("the chat template marks no assistant token")
        return TokenizedChat(
            np.array(input_ids, dtype=np.int32), np.array(loss_mask, dtype=np.bool_), source
        )

    def prompt(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> NDArray[np.int32]:
        """Return the ids [p] of a chat and the generation prompt: what a model goes on from.

        Raises:
            DataError: the template refuses the chat, does not read what it holds, or has no
                generation prompt; or the chat's text contains a special token.
        """
        self._template.check(messages, tools)
        input_ids = self._template.encode(messages, tools, add_generation_prompt=True)
        if input_ids == self._template.encode(messages, tools):
            raise DataError(
                "the chat template has no generation prompt, so that no answer is asked for",
                remedy="use a chat template that reads add_generation_prompt",
            )
        return np.array(input_ids, dtype=np.int32)

    def _texts_of_stop_tokens(self) -> tuple[str, ...]:
        texts = self.tokenizer.convert_ids_to_tokens(sorted(self.stop_token_ids))
        if any(text is None for text in texts):
            raise DataError(
                "a stop token is not in the tokenizer's vocabulary",
                got=sorted(self.stop_token_ids),
                expected=f"ids below {len(self.tokenizer)}",
            )
        return tuple(texts)

    def _masked_by_template(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[list[int], list[bool]]:
        encoded = self._template.apply(messages, tools, return_assistant_tokens_mask=True)
        return list(encoded["input_ids"]), [bool(value) for value in encoded["assistant_masks"]]

    def _masked_by_prefixes(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[list[int], list[bool]]:
        input_ids = self._template.encode(messages, tools)
        loss_mask = [False] * len(input_ids)
        for index, message in enumerate(messages):
            if message["role"] == "assistant":
                start = self._prompt_length(messages[:index], tools, input_ids)
                stop = self._turn_end(messages[: index + 1], tools, input_ids)
                loss_mask[start:stop] = [True] * (stop - start)
        return input_ids, loss_mask

    def _prompt_length(
        self,
        before: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        input_ids: list[int],
    ) -> int:
        if not before:
            raise DataError(
                "the chat starts with an assistant message, so there is no prompt before it",
                remedy="start the chat with a system or user message",
            )
        for args in _PROMPT_ARGS:
            prompt = self._template.encode(before, tools, add_generation_prompt=True, **args)
            if input_ids[: len(prompt)] == prompt:
                return len(prompt)
        raise DataError(
            f"the generation prompt before messages[{len(before)}] is no prefix of the chat, "
            "so its assistant tokens cannot be told",
            remedy="use a template with {% generation %} markers, or see data.chat_template_args",
        )

    def _turn_end(
        self,
        upto: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        input_ids: list[int],
    ) -> int:
        turn = self._template.encode(upto, tools)
        if input_ids[: len(turn)] == turn:
            return len(turn)
        raise DataError(
            f"the chat up to messages[{len(upto) - 1}] is no prefix of the whole chat: the "
            "template changes earlier turns (many drop their reasoning)",
            remedy="data.chat_template_args.clear_thinking = false keeps reasoning in GLM "
            "templates; or remove reasoning from all turns but those after the last user message",
        )

    def _settle_stop_tokens(
        self,
        input_ids: list[int],
        loss_mask: list[bool],
        messages: Sequence[Mapping[str, Any]],
    ) -> None:
        """End every assistant span right after its stop token, in place."""
        for start, end in _spans(loss_mask):
            stops = [i for i in range(start, end) if input_ids[i] in self.stop_token_ids]
            if stops:
                # What a template writes after the stop token is never generated.
                loss_mask[stops[0] + 1 : end] = [False] * (end - stops[0] - 1)
            elif end < len(input_ids):
                # Another token than a stop token here is a boundary that the model cannot end on.
                loss_mask[end] = input_ids[end] in self.stop_token_ids
            else:
                # A tool call is followed by its result, any other last turn by the user.
                after = "tool" if messages[-1].get("tool_calls") else "user"
                input_ids.append(self._stop_token_before(after))
                loss_mask.append(True)

    def _stop_token_before(self, role: str) -> int:
        """Return the token that a next message of `role` starts with, if it stops; else eos."""
        # A chat of its own: the next message may change what a template writes for earlier ones.
        turn = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}]
        shorter = self._template.encode(turn)
        longer = self._template.encode([*turn, {"role": role, "content": "x"}])
        following = longer[len(shorter) : len(shorter) + 1]
        if longer[: len(shorter)] == shorter and following and following[0] in self.stop_token_ids:
            return int(following[0])
        eos = self.tokenizer.eos_token_id
        return int(eos) if eos in self.stop_token_ids else min(self.stop_token_ids)


def _spans(mask: Sequence[bool]) -> list[tuple[int, int]]:
    """Return [start, end) of every run of True."""
    edges = np.flatnonzero(np.diff(np.array([False, *mask, False], dtype=np.int8)))
    return [(int(start), int(end)) for start, end in edges.reshape(-1, 2)]


def tokenize_chats(chats: Iterable[Chat], chat_tokenizer: ChatTokenizer) -> list[TokenizedChat]:
    """Tokenise all chats.

    Raises:
        DataError: one that lists every chat that cannot be tokenised, with its file and line;
            or what the chats' reader raises.
    """

    def tokenize(chat: Chat) -> TokenizedChat:
        return chat_tokenizer(chat.messages, chat.source, chat.tools)

    return tokenize_all(chats, tokenize, "chats")


class _HasSource(Protocol):
    @property
    def source(self) -> str: ...


def tokenize_all[Row: _HasSource, Tokenized](
    rows: Iterable[Row], tokenize: Callable[[Row], Tokenized], noun: str
) -> list[Tokenized]:
    """tokenize(row) of every row.

    Raises:
        DataError: one that lists all rows for which tokenize raised one; or what `rows` raises.
    """
    problems, tokenized = Problems(), []
    remedies: dict[str, None] = {}  # in the order of the problems, each once
    for row in rows:
        try:
            tokenized.append(tokenize(row))
        except DataError as error:
            problems.add(row.source, error.what)
            if error.remedy is not None:
                remedies[error.remedy] = None
    problems.raise_if_any(f"{noun} that cannot be tokenised", "\n    or: ".join(remedies) or None)
    return tokenized


def check_fits_model(
    chats: Iterable[TokenizedChat], *, vocab_size: int, longest: int, cut_at: int
) -> None:
    """Every token must have a row in the embedding, every position be one that the model knows.

    longest: positions of the model [tokens]; chats are cut at `cut_at` tokens, or refused.

    Raises:
        DataError: a token id of at least vocab_size, or a chat of more than `longest` tokens.
    """
    for chat in chats:
        if min(len(chat), cut_at) > longest:
            raise DataError(
                f"{chat.source}: a chat is longer than the model's positions",
                got=f"{len(chat)} tokens",
                expected=f"at most max_position_embeddings = {longest}",
                remedy="lower data.seq_length, with data.too_long = 'truncate' or 'skip'",
            )
        check_ids(chat.input_ids, chat.source, vocab_size)


def check_ids(input_ids: NDArray[np.int32], source: str, vocab_size: int) -> None:
    """Every one of the ids [t], t >= 1, must have a row in the embedding.

    Raises:
        DataError: a token id of at least vocab_size.
    """
    if (largest := int(input_ids.max())) >= vocab_size:
        raise DataError(
            f"{source}: the tokenizer gives ids that the model does not have",
            got=f"id {largest}",
            expected=f"ids below vocab_size = {vocab_size}",
            remedy="use the tokenizer that belongs to the checkpoint",
        )
