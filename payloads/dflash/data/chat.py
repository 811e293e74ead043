"""The target's chat template, and which characters of a rendered conversation are its answers.

Templates rarely mark answers, so they are found: what the template renders for the turns before an answer,
with its generation prompt, is where the answer begins. A template may write an earlier turn otherwise than
it was prompted for (Qwen3 drops the thoughts of earlier turns, and its prompt may hold empty ones): then the
answer begins where both still agree, at the end of a token, and must read there as the message says. An
answer that is not found so is refused; none is guessed. Knows nothing of documents, lengths and files.
"""

import hashlib
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from dflash.data.records import Conversation, Message

Span = tuple[int, int]
THOUGHTS_END = "</think>"
SPACES = re.compile(r"\s*")


class Refused(ValueError):
    """The template does not take the conversation, or its answers cannot be found in what it makes of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendered:
    """A conversation as one text, and the spans [start, end) of its answers, each with its end of turn."""

    text: str
    answers: tuple[Span, ...]


class Chat:
    """A tokenizer's chat template in one thinking mode; None leaves the mode to the template.

    Raises:
        ValueError: the tokenizer has no template, or none that takes a thinking mode that was asked for.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, thinking: bool | None = None) -> None:
        if not tokenizer.chat_template:
            raise ValueError(
                f"the tokenizer of {tokenizer.name_or_path or 'the target'} has no chat template; "
                "give it one (chat_template.jinja beside its files), or data that is text or token ids"
            )
        if not tokenizer.is_fast:
            raise ValueError(
                "only a fast tokenizer says where its tokens begin; save this one with a tokenizer.json"
            )
        self._tokenizer = tokenizer
        self._template = tokenizer.get_chat_template()
        takes_mode = "enable_thinking" in self._template
        if thinking is not None and not takes_mode:
            raise ValueError(
                "thinking is set, but the target's chat template has no enable_thinking; leave it out"
            )
        self._mode: dict[str, Any] = {} if thinking is None else {"enable_thinking": thinking}
        special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        special |= set(tokenizer.all_special_tokens)
        longest_first = sorted(special, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._end_of_turn = re.compile(rf"\s*(?:{self._special.pattern})")

    @property
    def description(self) -> str:
        """The template's hash and the thinking mode, for the record."""
        digest = hashlib.sha256(self._template.encode()).hexdigest()[:12]
        thinking = {True: "on", False: "off", None: "left to it"}[self._mode.get("enable_thinking")]
        return f"template {digest}, thinking {thinking}"

    def prompt(self, conversation: Conversation, turns: int) -> str:
        """Return what the target reads before it answers the first `turns` messages.

        Raises:
            Refused: the template does not take them.
        """
        return self._render(conversation, turns, add_generation_prompt=True)

    def render(self, conversation: Conversation, *, last_turn_only: bool = False) -> Rendered:
        """Return the whole conversation with the spans of its answers, or of its last one alone.

        Raises:
            Refused: the template does not take it, or an answer cannot be found.
        """
        messages = conversation.messages
        # What a target says before anybody spoke to it is no answer.
        turns = [turn for turn in range(1, len(messages)) if messages[turn]["role"] == "assistant"]
        text = self._render(conversation, len(messages))
        spans = [self._answer(conversation, turn, text) for turn in turns[-1 if last_turn_only else 0 :]]
        _check_order(spans)
        return Rendered(text=text, answers=tuple(spans))

    def _render(self, conversation: Conversation, turns: int, **options: Any) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                list(conversation.messages[:turns]),
                tools=conversation.tools,
                tokenize=False,
                **options,
                **self._mode,
            )
            assert isinstance(text, str)
            text.encode()  # no tokenizer takes half a character, as a tool's name may hold one
        except Exception as error:  # a template is a program of others, and a record is anything
            raise Refused(f"the chat template says: {_first_line(error)}") from error
        return text

    def _answer(self, conversation: Conversation, turn: int, text: str) -> Span:
        start = self._start(conversation, turn, text)
        message = conversation.messages[turn]
        if message.get("tool_calls"):
            return start, self._end_of_call(conversation, turn, text, start)
        answer = _without_thoughts(message)
        place = self._place(answer, text, start)
        if place is None:
            raise Refused(f"the answer of turn {turn + 1} does not stand where the template prompts for it")
        end = place + len(answer)
        end_of_turn = self._end_of_turn.match(text, end)
        return start, end_of_turn.end() if end_of_turn else end

    def _place(self, answer: str, text: str, start: int) -> int | None:
        """Return where an answer stands: at once, or behind thoughts; spaces may stand before it."""
        # Thoughts hold no end of turn: behind one, the same words are those of another turn.
        special = self._special.search(text, start)
        until = special.start() if special else len(text)
        thoughts = re.finditer(THOUGHTS_END, text[start:until])
        for offset in itertools.chain([0], (found.end() for found in thoughts)):
            place = _behind_spaces(text, start + offset)
            if text.startswith(answer, place):
                return place
        return None

    def _start(self, conversation: Conversation, turn: int, text: str) -> int:
        prompt = self._render(conversation, turn, add_generation_prompt=True)
        if text.startswith(prompt):
            return len(prompt)
        before = self._render(conversation, turn)
        if not (text.startswith(before) and prompt.startswith(before)):
            raise Refused(f"the template rewrites what stands before turn {turn + 1}")
        agreed = _common_length(text, prompt)
        ends = [end for _, end in self._offsets(prompt) if len(before) < end <= agreed]
        if not ends:
            raise Refused(f"the template begins turn {turn + 1} otherwise than it prompts for it")
        return max(ends)

    def _end_of_call(self, conversation: Conversation, turn: int, text: str, start: int) -> int:
        """Return where an answer that calls tools ends: the template has its own words for calls."""
        until = self._render(conversation, turn + 1)
        if not text.startswith(until):
            raise Refused(f"the template rewrites the tool calls of turn {turn + 1}")
        ends = [found.end() for found in self._special.finditer(text, start, len(until))]
        return ends[-1] if ends else len(until)

    def _offsets(self, text: str) -> Sequence[Span]:
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        offsets: Any = encoded["offset_mapping"]
        return [(start, end) for start, end in offsets]


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _without_thoughts(message: Message) -> str:
    """Return the answer itself: templates write thoughts in their own way, and trim both."""
    content: str = message["content"]
    return content.rpartition(THOUGHTS_END)[2].strip()


def _behind_spaces(text: str, start: int) -> int:
    spaces = SPACES.match(text, start)
    assert spaces is not None
    return spaces.end()


def _common_length(one: str, other: str) -> int:
    pairs = zip(one, other, strict=False)
    return next((number for number, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _check_order(spans: Sequence[Span]) -> None:
    for (_, end), (start, _) in itertools.pairwise(spans):
        if start < end:
            raise Refused("an answer was found within the one after it")
