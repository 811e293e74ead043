"""A record as token ids and a loss mask.

Knows the tokenizer and, through chat.py, its template; nothing of lengths, files and reports. A token is
learnt when it lies in an answer: from the first after the generation prompt to the end of the turn. A token
that begins before the answer counts when only spaces of it stand there, as tokenizers have words with a space
in front.
"""

from collections.abc import Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

from dflash.data.chat import Chat, Rendered, Span
from dflash.data.records import BadRecord, Conversation, Text, TokenIds
from dflash.data.rows import Document, Mask, Tokens


class Tokeniser:
    """Makes documents; without a tokenizer, of token ids alone."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        vocab_size: int,
        thinking: bool | None = None,
        last_turn_only: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._thinking = thinking
        self._last_turn_only = last_turn_only
        self._chat: Chat | None = None

    @property
    def description(self) -> str:
        """How conversations were rendered; empty when there was none."""
        return self._chat.description if self._chat else ""

    def document(self, record: Conversation | Text | TokenIds, source: str) -> Document:
        """Return a record's tokens, all of them, however many.

        Raises:
            BadRecord: a token id is not in the vocabulary.
            Refused: the chat template does not take it (dflash.data.chat).
            ValueError: the record needs a tokenizer or a template, and there is none.
        """
        tokens, mask = self._encode(record)
        if len(tokens) and tokens.max() >= self._vocab_size:
            raise BadRecord(
                f"input_ids holds {tokens.max()}; the target's vocabulary ends at {self._vocab_size - 1}"
            )
        return Document(tokens=tokens, loss_mask=mask, source=source)

    def _encode(self, record: Conversation | Text | TokenIds) -> tuple[Tokens, Mask]:
        match record:
            case TokenIds():
                return record.tokens, record.loss_mask
            case Text():
                return self._encode_text(record.text)
            case Conversation():
                if self._chat is None:
                    self._chat = Chat(self._needed(), thinking=self._thinking)
                rendered = self._chat.render(record, last_turn_only=self._last_turn_only)
                return self._encode_rendered(rendered)

    def _encode_text(self, text: str) -> tuple[Tokens, Mask]:
        encoded = self._needed()(text, return_special_tokens_mask=True, verbose=False)
        added = np.array(encoded["special_tokens_mask"], dtype=np.bool_)
        return np.array(encoded["input_ids"], dtype=np.int32), ~added

    def _encode_rendered(self, rendered: Rendered) -> tuple[Tokens, Mask]:
        encoded = self._needed()(
            rendered.text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        mask = answer_mask(rendered.text, rendered.answers, encoded["offset_mapping"])
        return np.array(encoded["input_ids"], dtype=np.int32), mask

    def _needed(self) -> PreTrainedTokenizerBase:
        if self._tokenizer is None:
            raise ValueError("conversations and texts need the target's tokenizer, and there is none")
        return self._tokenizer


def answer_mask(text: str, answers: Sequence[Span], offsets: Sequence[Span]) -> Mask:
    """Return for each token, given as its [start, end) in the text, whether it lies in an answer."""
    mask = np.zeros(len(offsets), dtype=np.bool_)
    spans = iter(answers)
    start, end = next(spans, (len(text), len(text)))
    for token, (first, last) in enumerate(offsets):
        while first >= end and end < len(text):
            start, end = next(spans, (len(text), len(text)))
        mask[token] = start < last <= end and not text[first:start].strip()
    return mask
