"""What a record of any container may hold: a conversation, a text, or token ids.

    {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}
    {"conversations": [{"from": "human", "value": "…"}, {"from": "gpt", "value": "…"}]}
    {"text": "…"}
    {"input_ids": [1, 2, …], "loss_mask": [0, 1, …]}
    {"prompt": "…"}                                     a question without its answer, for generating

`tools` beside messages goes to the chat template; `key` says what a document is about, for the held-out
split. Knows no tokenizer.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dflash.data.rows import Mask, Tokens

Message = dict[str, Any]

ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "system": "system",
    "developer": "developer",
    "tool": "tool",
    "observation": "tool",
    "function": "tool",
}


class BadRecord(ValueError):
    """A record holds nothing that can be read; the message goes behind its place."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """Messages with `role` and `content`, as chat templates take them, and the tools they may call."""

    key: str
    messages: tuple[Message, ...]
    tools: list[Any] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    """A plain text, learnt throughout."""

    key: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenIds:
    """A document that is tokenised already."""

    key: str
    tokens: Tokens = field(repr=False)
    loss_mask: Mask = field(repr=False)


def parse_record(record: Mapping[str, Any]) -> Conversation | Text | TokenIds:
    """Return what a record holds.

    Raises:
        BadRecord: it holds none of the forms, or one that is malformed.
    """
    if "input_ids" in record:
        return _token_ids(record)
    if "messages" in record:
        return _conversation(record, "messages", "role", "content")
    if "conversations" in record:
        return _conversation(record, "conversations", "from", "value")
    if "text" in record:
        return Text(key=_key(record, record["text"]), text=_string(record, "text"))
    if "prompt" in record:
        message = {"role": "user", "content": _string(record, "prompt")}
        return Conversation(key=_key(record, [message]), messages=(message,))
    known = "messages, conversations, text, prompt, or input_ids with loss_mask"
    raise BadRecord(f"has {', '.join(map(repr, record)) or 'nothing'}; expected one of {known}")


def _conversation(record: Mapping[str, Any], name: str, role: str, content: str) -> Conversation:
    turns = record[name]
    if not isinstance(turns, list) or not turns:
        raise BadRecord(f"{name} is no list of turns")
    messages = tuple(_message(turn, f"{name}[{number}]", role, content) for number, turn in enumerate(turns))
    tools = record.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise BadRecord("tools is no list")
    return Conversation(key=_key(record, messages), messages=messages, tools=tools or None)


def _message(turn: Any, place: str, role: str, content: str) -> Message:
    if not isinstance(turn, dict):
        raise BadRecord(f"{place} is no object")
    said = turn.get(role)
    if not isinstance(said, str) or said not in ROLES:
        raise BadRecord(f"{place}.{role} is {said!r}; known: {', '.join(ROLES)}")
    # A table has every column in every row; what is None there was not said.
    others = {key: value for key, value in turn.items() if key not in {role, content} and value is not None}
    text = turn.get(content)
    if text is None and others.get("tool_calls"):
        text = ""
    if not isinstance(text, str):
        raise BadRecord(f"{place}.{content} is {type(text).__name__}, not a string")
    _require_characters(text, f"{place}.{content}")
    return {**others, "role": ROLES[said], "content": text}


def _token_ids(record: Mapping[str, Any]) -> TokenIds:
    if "loss_mask" not in record:
        raise BadRecord("has input_ids without loss_mask (0 or 1 for each token)")
    tokens, mask = _integers(record, "input_ids"), _integers(record, "loss_mask")
    if len(tokens) != len(mask):
        raise BadRecord(f"has {len(tokens)} input_ids and a loss_mask of {len(mask)}")
    if len(mask) and not 0 <= mask.min() <= mask.max() <= 1:
        raise BadRecord("loss_mask holds other numbers than 0 and 1")
    if len(tokens) and not 0 <= tokens.min() <= tokens.max() < 2**31:
        raise BadRecord(f"input_ids holds {tokens.min()} … {tokens.max()}, which are no token ids")
    ids = tokens.astype(np.int32)
    return TokenIds(key=_key(record, ids), tokens=ids, loss_mask=mask.astype(np.bool_))


def _integers(record: Mapping[str, Any], name: str) -> Any:
    values = record[name]
    if not isinstance(values, list) or not all(isinstance(value, int) for value in values):
        raise BadRecord(f"{name} is no list of integers")
    try:
        return np.array(values, dtype=np.int64)
    except OverflowError:
        raise BadRecord(f"{name} holds a number of more than 64 bits") from None


def _string(record: Mapping[str, Any], name: str) -> str:
    value = record[name]
    if not isinstance(value, str):
        raise BadRecord(f"{name} is {type(value).__name__}, not a string")
    _require_characters(value, name)
    return value


def _require_characters(text: str, name: str) -> None:
    """Refuse text that no tokenizer takes: JSON may hold one half of a character written as two."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRecord(f"{name} holds half a character, {text[error.start]!a}") from None


def _key(record: Mapping[str, Any], content: Any) -> str:
    """Return the record's own key, or a hash of what it says; neither knows a tokenizer or a template."""
    given = record.get("key")
    if isinstance(given, str) and given:
        return given
    if isinstance(content, np.ndarray):
        return hashlib.sha256(content.tobytes()).hexdigest()
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
