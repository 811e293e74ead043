"""Packed rows of a corpus, from any place in any epoch, for one worker of several.

Knows nothing of queues or devices. Shape letters: S tokens of a row.
"""

import itertools
from collections.abc import Iterator

import torch

from dflash.data.corpus import Corpus
from dflash.data.epochs import fill_share, pack_epoch
from dflash.data.rows import PackedRow

HOST = torch.device("cpu")


class RowSource:
    """Rows of `budget` tokens; the same corpus, budget, cap and seed give the same rows everywhere."""

    def __init__(
        self, corpus: Corpus, *, budget: int, max_documents: int, seed: int, padding_id: int = 0
    ) -> None:
        if not len(corpus):
            raise ValueError("no document is left to train on; the data report says what was dropped and why")
        self._corpus = corpus
        self._budget = budget
        self._max_documents = max_documents
        self._seed = seed
        self._padding_id = padding_id
        self._lengths = corpus.lengths
        self._packed: tuple[int, list[tuple[int, ...]]] | None = None

    def number_of_rows(self, epoch: int) -> int:
        """Return how many rows an epoch has; it may differ by a few from that of another."""
        return len(self._epoch(epoch))

    def fill_share(self, epoch: int) -> float:
        """Return which share of the epoch's tokens is not padding."""
        return fill_share(self._epoch(epoch), self._lengths, self._budget)

    def rows(
        self, epoch: int = 0, number: int = 0, *, worker: int = 0, workers: int = 1, epochs: int | None = None
    ) -> Iterator[PackedRow]:
        """Yield the rows from (epoch, number) on whose number is `worker` modulo `workers`, in order.

        Goes on into the next epochs, without end, or until epoch number `epochs` would begin.
        """
        if not 0 <= worker < workers:
            raise ValueError(f"worker is {worker} of {workers}; workers count from 0")
        numbers = itertools.count(epoch) if epochs is None else range(epoch, epochs)
        for current in numbers:
            start = number if current == epoch else 0
            own = start + (worker - start) % workers
            packed = self._epoch(current)  # kept here: another worker may be in another epoch
            for own_number in range(own, len(packed), workers):
                yield self._filled(current, own_number, packed[own_number])

    def _epoch(self, epoch: int) -> list[tuple[int, ...]]:
        packed = self._packed
        if packed is None or packed[0] != epoch:
            rows = pack_epoch(self._lengths, self._budget, self._max_documents, self._seed, epoch)
            packed = self._packed = (epoch, rows)  # one assignment: threads may share the source
        return packed[1]

    def _filled(self, epoch: int, number: int, documents: tuple[int, ...]) -> PackedRow:
        ids_1S = torch.full((1, self._budget), self._padding_id, dtype=torch.int64, device=HOST)
        mask_1S = torch.zeros((1, self._budget), dtype=torch.bool, device=HOST)
        end = 0
        for document in (self._corpus[index] for index in documents):
            start, end = end, end + len(document.tokens)
            ids_1S[0, start:end] = torch.tensor(document.tokens, dtype=torch.int64, device=HOST)
            mask_1S[0, start:end] = torch.tensor(document.loss_mask, device=HOST)
        return PackedRow(
            epoch=epoch,
            number=number,
            documents=documents,
            input_ids_1S=ids_1S,
            loss_mask_1S=mask_1S,
            lengths=tuple(self._lengths[index] for index in documents),
        )
