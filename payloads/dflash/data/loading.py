"""Data files become two corpora, one to train on and one held out, and a report of the rest.

Knows the order of the steps: read, tokenise, limit, keep what can be learnt from, split. Files are streamed;
what stays in memory are the tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from dflash.data.chat import Refused
from dflash.data.corpus import Corpus
from dflash.data.files import Entry, find_files, read_entries
from dflash.data.held_out import is_held_out
from dflash.data.records import BadRecord, parse_record
from dflash.data.report import BAD, REFUSED, TOO_LONG, UNTRAINABLE, DataReport
from dflash.data.rows import Document, has_trainable_pair
from dflash.data.tokenising import Tokeniser
from dflash.values import require_choice, require_positive

LONG_DOCUMENTS = ("truncate", "drop")


class BadData(ValueError):
    """A record that cannot be used, where that is fatal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadOptions:
    """How records become documents.

    `max_document_tokens` is at most the token budget; longer documents are cut there or dropped.
    `thinking` is the template's `enable_thinking`, None leaves it alone. With `strict` a bad line, or a
    conversation that the template refuses, ends everything.
    """

    max_document_tokens: int
    long_documents: str = "truncate"
    thinking: bool | None = None
    last_turn_only: bool = False
    held_out_share: float = 0.0
    strict: bool = False

    def __post_init__(self) -> None:
        require_positive(self, "max_document_tokens")
        require_choice("long_documents", self.long_documents, LONG_DOCUMENTS)
        if not 0 <= self.held_out_share < 1:
            raise ValueError(f"held_out_share is {self.held_out_share}; it must be at least 0 and below 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedData:
    """What came of the files."""

    train: Corpus
    held_out: Corpus
    report: DataReport


def load_documents(
    paths: Sequence[str | Path],
    *,
    options: LoadOptions,
    tokenizer: PreTrainedTokenizerBase | None,
    vocab_size: int,
) -> LoadedData:
    """Return the documents of files and folders, in their order; the same files give the same ones.

    Raises:
        ValueError: a file is missing or cannot be read, or conversations lack a tokenizer or a template.
        BadData: `strict`, and a record cannot be used.
    """
    report = DataReport()
    held_out: list[Document] = []
    train = Corpus(_training(_Loader(options, tokenizer, vocab_size, report).stream(paths), held_out, report))
    return LoadedData(train=train, held_out=Corpus(held_out), report=report)


def _training(
    found: Iterator[tuple[Document, bool]], held_out: list[Document], report: DataReport
) -> Iterator[Document]:
    """Yield what is trained on; what is held out goes into the list."""
    for document, is_apart in found:
        if is_apart:
            report.held_out.count(document)
            held_out.append(document)
        else:
            report.train.count(document)
            yield document


class _Loader:
    def __init__(
        self,
        options: LoadOptions,
        tokenizer: PreTrainedTokenizerBase | None,
        vocab_size: int,
        report: DataReport,
    ) -> None:
        self._options = options
        self._report = report
        self._tokeniser = Tokeniser(
            tokenizer,
            vocab_size=vocab_size,
            thinking=options.thinking,
            last_turn_only=options.last_turn_only,
        )

    def stream(self, paths: Sequence[str | Path]) -> Iterator[tuple[Document, bool]]:
        """Yield each usable document, and whether it is held out."""
        files = find_files(paths)
        self._report.files = len(files)
        for entry in read_entries(files):
            self._report.records += 1
            found = self._usable(entry)
            if found is not None:
                yield found
        self._report.rendering = self._tokeniser.description

    def _usable(self, entry: Entry) -> tuple[Document, bool] | None:
        try:
            if entry.record is None:
                raise BadRecord(entry.problem)
            record = parse_record(entry.record)
            document = self._limited(self._tokeniser.document(record, entry.place))
        except BadRecord as error:
            self._lose(BAD, entry.place, error)
            return None
        except Refused as error:
            self._lose(REFUSED, entry.place, error)
            return None
        if document is None:
            return None
        return document, is_held_out(record.key, self._options.held_out_share)

    def _lose(self, reason: str, place: str, error: ValueError) -> None:
        if self._options.strict:
            raise BadData(
                f"{place}: {error}; mend or remove it, or load without strict to drop it"
            ) from error
        self._report.drop(reason, place, str(error))

    def _limited(self, document: Document) -> Document | None:
        tokens, most = len(document.tokens), self._options.max_document_tokens
        if tokens > most and self._options.long_documents == "drop":
            self._report.drop(TOO_LONG, document.source, f"{tokens:,} tokens, at most {most:,}")
            return None
        kept = Document(
            tokens=document.tokens[:most], loss_mask=document.loss_mask[:most], source=document.source
        )
        if not has_trainable_pair(kept.loss_mask):
            what = f"within its first {most:,} tokens" if tokens > most else f"in its {tokens:,} tokens"
            self._report.drop(UNTRAINABLE, kept.source, f"no two tokens of an answer in a row {what}")
            return None
        if tokens > most:
            self._report.truncate(kept.source, f"{tokens:,} tokens, cut to {most:,}")
        return kept
