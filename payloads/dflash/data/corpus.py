"""Many documents at five bytes a token: their tokens stand one after the other in two arrays.

Knows nothing of rows. Lists of Python integers would take eight times as much, and objects per document slow
the garbage collector down.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import overload

import numpy as np

from dflash.data.rows import Document, Mask, Tokens


class Corpus(Sequence[Document]):
    """A sequence of documents that cannot change once it is made."""

    def __init__(self, documents: Iterable[Document]) -> None:
        tokens, mask = array("i"), bytearray()
        ends, sources = array("q", [0]), []
        for document in documents:
            tokens.frombytes(np.ascontiguousarray(document.tokens, dtype=np.int32).tobytes())
            mask += np.ascontiguousarray(document.loss_mask, dtype=np.bool_).tobytes()
            ends.append(len(tokens))
            sources.append(document.source)
        self._tokens: Tokens = np.frombuffer(tokens, dtype=np.int32) if tokens else np.empty(0, np.int32)
        self._mask: Mask = np.frombuffer(mask, dtype=np.bool_) if mask else np.empty(0, np.bool_)
        self._tokens.flags.writeable = self._mask.flags.writeable = False
        self._ends = ends
        self._sources = tuple(sources)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Each document's number of tokens."""
        return tuple(np.diff(self._ends).tolist())

    def __len__(self) -> int:
        return len(self._sources)

    def __iter__(self) -> Iterator[Document]:
        return (self[index] for index in range(len(self)))

    @overload
    def __getitem__(self, index: int) -> Document: ...

    @overload
    def __getitem__(self, index: slice) -> "Corpus": ...

    def __getitem__(self, index: int | slice) -> "Document | Corpus":
        """Return a document as views, or a smaller corpus as a copy."""
        if isinstance(index, slice):
            return Corpus(self[number] for number in range(*index.indices(len(self))))
        number = range(len(self))[index]
        place = slice(self._ends[number], self._ends[number + 1])
        return Document(tokens=self._tokens[place], loss_mask=self._mask[place], source=self._sources[number])
