"""Questions for a target: what it reads before each answer of a conversation, as token ids.

Knows records and the chat template. A conversation gives one prompt for each of its answers, of all that
stands before it, and one for a question at its end that nobody answered.
"""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from dflash.data.chat import Chat, Refused
from dflash.data.files import Entry
from dflash.data.records import BadRecord, Conversation, parse_record
from dflash.data.report import BAD, REFUSED, TOO_LONG, DataReport


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """Token ids, a hash of the text that they are of, and the key that its document will have."""

    tokens: tuple[int, ...]
    digest: str
    key: str


class BadPrompt(ValueError):
    """A record that gives no prompt, where that is fatal."""


class PromptReader:
    """Makes prompts of entries, each text once; what gives none goes into the report."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, chat: Chat, *, max_tokens: int, strict: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._chat = chat
        self._max_tokens = max_tokens
        self._strict = strict
        self.report = DataReport(rendering=chat.description)

    def prompts(self, entries: Iterable[Entry]) -> Iterator[Prompt]:
        """Yield the prompts in order.

        Raises:
            BadPrompt: `strict`, and a record gives none.
        """
        seen = set()
        for entry in entries:
            self.report.records += 1
            for prompt in self._of(entry):
                if prompt.digest not in seen:
                    seen.add(prompt.digest)
                    yield prompt

    def _of(self, entry: Entry) -> Iterator[Prompt]:
        try:
            conversation = _conversation(entry)
            for turns in _questions(conversation):
                text = self._chat.prompt(conversation, turns)
                yield from self._short_enough(text, conversation.key, entry.place)
        except (BadRecord, Refused) as error:
            if self._strict:
                raise BadPrompt(
                    f"{entry.place}: {error}; mend or remove it, or go on without strict"
                ) from error
            self.report.drop(BAD if isinstance(error, BadRecord) else REFUSED, entry.place, str(error))

    def _short_enough(self, text: str, key: str, place: str) -> Iterator[Prompt]:
        ids = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        tokens = tuple(int(token) for token in ids)
        if len(tokens) > self._max_tokens:
            self.report.drop(
                TOO_LONG, place, f"a prompt of {len(tokens):,} tokens, at most {self._max_tokens:,}"
            )
            return
        digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
        yield Prompt(tokens=tokens, digest=digest, key=key)


def _conversation(entry: Entry) -> Conversation:
    if entry.record is None:
        raise BadRecord(entry.problem)
    record = parse_record(entry.record)
    if not isinstance(record, Conversation):
        raise BadRecord("holds no prompt and no conversation to answer")
    return record


def _questions(conversation: Conversation) -> list[int]:
    """Return how many messages stand before each answer that is wanted."""
    roles = [message["role"] for message in conversation.messages]
    turns = [turn for turn, role in enumerate(roles) if role == "assistant" and turn]
    return turns if roles[-1] == "assistant" else [*turns, len(roles)]
