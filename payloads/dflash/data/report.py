"""What became of the records: how many are learnt from, and which were dropped, why, and where they stand.

Knows reasons and counts; who drops is loading.py.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dflash.data.rows import Document

BAD = "bad line"
REFUSED = "refused by the chat template"
TOO_LONG = "too long"
UNTRAINABLE = "no trainable pair"
TRUNCATED = "truncated"
EXAMPLES = 3  # of each reason


@dataclass(kw_only=True, slots=True)
class Share:
    """Documents of one side of the split, and their tokens."""

    documents: int = 0
    tokens: int = 0
    answer_tokens: int = 0

    def count(self, document: Document) -> None:
        """Count one more."""
        self.documents += 1
        self.tokens += len(document.tokens)
        self.answer_tokens += int(np.count_nonzero(document.loss_mask))

    def __str__(self) -> str:
        return f"{self.documents:,} documents, {self.tokens:,} tokens, {self.answer_tokens:,} of answers"


@dataclass(kw_only=True, slots=True)
class DataReport:
    """Counts by reason; a truncated document is counted and kept, all others named here are dropped."""

    files: int = 0
    records: int = 0
    train: Share = field(default_factory=Share)
    held_out: Share = field(default_factory=Share)
    dropped: Counter[str] = field(default_factory=Counter)
    truncated: int = 0
    examples: dict[str, list[str]] = field(default_factory=dict)
    rendering: str = ""

    def drop(self, reason: str, place: str, detail: str) -> None:
        """Count a record that is dropped."""
        self.dropped[reason] += 1
        self._example(reason, place, detail)

    def truncate(self, place: str, detail: str) -> None:
        """Count a document that is cut."""
        self.truncated += 1
        self._example(TRUNCATED, place, detail)

    def as_json(self) -> Mapping[str, Any]:
        """Return everything as JSON values."""
        return {
            "files": self.files,
            "records": self.records,
            "train": _plain(self.train),
            "held_out": _plain(self.held_out),
            "dropped": dict(sorted(self.dropped.items())),
            "truncated": self.truncated,
            "examples": {reason: list(found) for reason, found in sorted(self.examples.items())},
            "rendering": self.rendering,
        }

    def as_text(self) -> str:
        """Return a few lines for a person."""
        counts = {**dict(self.dropped.most_common()), TRUNCATED: self.truncated}
        lines = [
            f"data: {self.records:,} records in {self.files:,} files"
            + (f"; {self.rendering}" if self.rendering else ""),
            f"  train     {self.train}",
            f"  held out  {self.held_out}",
        ]
        for reason, count in counts.items():
            if count:
                verb = "kept" if reason == TRUNCATED else "dropped"
                lines.append(f"  {verb} {count:,}: {reason}")
                lines += [f"    {example}" for example in self.examples[reason]]
        return "\n".join(lines)

    def _example(self, reason: str, place: str, detail: str) -> None:
        examples = self.examples.setdefault(reason, [])
        if len(examples) < EXAMPLES:
            examples.append(f"{place}: {detail}")


def _plain(share: Share) -> dict[str, int]:
    return {"documents": share.documents, "tokens": share.tokens, "answer_tokens": share.answer_tokens}
