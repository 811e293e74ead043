"""Which documents share a row of the token budget, epoch by epoch.

Knows lengths alone. An epoch is a pure function of its arguments, so its rows from number k on are the same
whether the first k were ever looked at or not. Order comes from the raw stream of a bit generator, the part
of NumPy's random numbers that never changes between its versions.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np

# Best fit looks at so many documents at once: the rows that it leaves half full are few beside the others.
WINDOW_DOCUMENTS = 4096


def pack_epoch(
    lengths: Sequence[int], budget: int, max_documents: int, seed: int, epoch: int
) -> list[tuple[int, ...]]:
    """Return the epoch's rows as tuples of document indices; each document stands in exactly one.

    A row has at most `max_documents` documents: many short ones once took more memory than a target had.

    Raises:
        ValueError: a document is empty or longer than the budget, or a number is not positive.
    """
    _check(lengths, budget, max_documents)
    documents = _shuffled(len(lengths), seed, epoch, 0)
    rows: list[tuple[int, ...]] = []
    for start in range(0, len(documents), WINDOW_DOCUMENTS):
        window = documents[start : start + WINDOW_DOCUMENTS]
        rows += _fewest_rows(window, lengths, budget, max_documents)
    # Best fit takes the longest first; a second shuffle keeps long rows from standing together.
    return [rows[index] for index in _shuffled(len(rows), seed, epoch, 1)]


def fill_share(rows: Sequence[Sequence[int]], lengths: Sequence[int], budget: int) -> float:
    """Return which share of the rows' tokens is documents and not padding."""
    if not rows:
        return 0.0
    return sum(lengths[document] for row in rows for document in row) / (len(rows) * budget)


def _check(lengths: Sequence[int], budget: int, max_documents: int) -> None:
    if budget < 1 or max_documents < 1:
        raise ValueError(f"budget is {budget} and max_documents {max_documents}; both must be at least 1")
    if lengths and min(lengths) < 1:
        raise ValueError(f"document {lengths.index(min(lengths))} is empty; drop it when loading")
    if lengths and max(lengths) > budget:
        raise ValueError(
            f"document {lengths.index(max(lengths))} has {max(lengths)} tokens, the budget is {budget}; "
            "truncate or drop long documents when loading"
        )


def _shuffled(count: int, *entropy: int) -> list[int]:
    bits = np.random.PCG64(np.random.SeedSequence(entropy)).random_raw(count)
    order: list[int] = np.argsort(bits, kind="stable").tolist()
    return order


def _fewest_rows(
    documents: list[int], lengths: Sequence[int], budget: int, max_documents: int
) -> list[tuple[int, ...]]:
    """Return the better of two packings: the longest first leaves least room, unless the cap binds.

    With the cap, longest first puts all the short ones together, and rows are full of documents long before
    they are full of tokens; in the order drawn each row has some of all.
    """
    longest_first = sorted(documents, key=lambda document: -lengths[document])
    packings = [_best_fit(order, lengths, budget, max_documents) for order in (longest_first, documents)]
    return min(packings, key=len)


def _best_fit(
    documents: Sequence[int], lengths: Sequence[int], budget: int, max_documents: int
) -> list[tuple[int, ...]]:
    """Return rows: each document in turn stands where the least room is left over."""
    rows: list[list[int]] = []
    open_rows: list[tuple[int, int]] = []  # (room, row), ascending
    for document in documents:
        place = bisect_left(open_rows, (lengths[document], 0))
        if place == len(open_rows):
            rows.append([])
            room, row = budget, len(rows) - 1
        else:
            room, row = open_rows.pop(place)
        rows[row].append(document)
        room -= lengths[document]
        if room and len(rows[row]) < max_documents:
            insort(open_rows, (room, row))
    return [tuple(row) for row in rows]
