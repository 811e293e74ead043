"""Rows of a token budget: every document once an epoch, little waste, and the same rows from any place on."""

import itertools
import random

import numpy as np
import pytest
from dflash.data.corpus import Corpus
from dflash.data.epochs import fill_share, pack_epoch
from dflash.data.row_source import RowSource
from dflash.data.rows import Document, PackedRow
from hypothesis import given, settings
from hypothesis import strategies as st


def corpus(lengths: list[int]) -> Corpus:
    """Documents whose tokens name them: 1000·document + place, every third token not learnt."""
    return Corpus(
        Document(
            tokens=np.arange(length, dtype=np.int32) + 1000 * number,
            loss_mask=np.arange(length) % 3 > 0,
            source=f"corpus:{number}",
        )
        for number, length in enumerate(lengths)
    )


DRAWN = random.Random(1)
LENGTHS = [DRAWN.randint(2, 60) for _ in range(80)]
SOURCE = RowSource(corpus(LENGTHS), budget=100, max_documents=4, seed=3, padding_id=7)


def facts(row: PackedRow) -> tuple[object, ...]:
    return (
        (row.epoch, row.number, row.documents, row.lengths),
        (row.input_ids_1S.tolist(), row.loss_mask_1S.tolist()),
    )


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 50), max_size=60),
    max_documents=st.integers(1, 9),
    seed=st.integers(0, 2**63),
    epoch=st.integers(0, 5),
)
def test_each_document_stands_in_one_row_within_budget_and_cap(
    lengths: list[int], max_documents: int, seed: int, epoch: int
) -> None:
    rows = pack_epoch(lengths, 50, max_documents, seed, epoch)
    assert sorted(itertools.chain.from_iterable(rows)) == list(range(len(lengths)))
    assert all(0 < len(row) <= max_documents for row in rows)
    assert all(sum(lengths[document] for document in row) <= 50 for row in rows)
    assert rows == pack_epoch(lengths, 50, max_documents, seed, epoch)


def test_epochs_and_seeds_shuffle_documents_and_rows() -> None:
    packed = [pack_epoch(LENGTHS, 100, 4, seed, epoch) for seed, epoch in ((3, 0), (3, 1), (4, 0), (0, 3))]
    for one, other in itertools.combinations(packed, 2):
        assert one != other
        assert {frozenset(row) for row in one} != {frozenset(row) for row in other}
    lengths = [max(LENGTHS[document] for document in row) for row in packed[0]]
    assert lengths != sorted(lengths, reverse=True)


def test_order_of_an_epoch_is_the_one_that_it_always_was() -> None:
    # A run resumed after an update of this code, or of NumPy, would otherwise see other rows.
    assert pack_epoch([5, 4, 3, 2, 1, 6, 7], 8, 3, 11, 2) == [(1,), (0, 2), (5, 3), (6, 4)]


@pytest.mark.parametrize(
    ("name", "budget", "max_documents", "least"),
    [
        ("conversations", 8192, 32, 0.99),
        ("long ones", 8192, 32, 0.99),
        ("short ones, whose rows the cap nearly fills", 8192, 56, 0.97),
    ],
)
def test_little_of_a_row_is_padding(name: str, budget: int, max_documents: int, least: float) -> None:
    drawn = np.random.default_rng(0)
    lengths = {
        "conversations": np.clip(drawn.lognormal(5.7, 0.7, 6000), 5, budget),
        "long ones": np.clip(drawn.lognormal(7.5, 0.8, 3000), 5, budget),
        "short ones, whose rows the cap nearly fills": drawn.integers(60, 260, 6000),
    }
    documents = lengths.get(name, lengths["conversations"]).astype(int).tolist()
    rows = pack_epoch(documents, budget, max_documents, 0, 0)
    share = fill_share(rows, documents, budget)
    assert share == pytest.approx(sum(documents) / (budget * len(rows)))
    assert least < share <= 1


@pytest.mark.parametrize(
    ("lengths", "budget", "max_documents", "words"),
    [
        ([3, 9], 8, 2, "document 1 has 9 tokens, the budget is 8; truncate or drop"),
        ([3, 0], 8, 2, "document 1 is empty"),
        ([3], 0, 2, "budget is 0"),
        ([3], 8, 0, "max_documents 0"),
    ],
)
def test_what_cannot_be_packed_is_refused(
    lengths: list[int], budget: int, max_documents: int, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        pack_epoch(lengths, budget, max_documents, 0, 0)


def test_row_holds_its_documents_and_then_padding() -> None:
    documents = corpus(LENGTHS)
    for row in itertools.islice(SOURCE.rows(), 10):
        ids, mask = row.input_ids_1S[0].tolist(), row.loss_mask_1S[0].tolist()
        expected = [documents[index] for index in row.documents]
        assert row.lengths == tuple(len(document.tokens) for document in expected)
        padding = 100 - sum(row.lengths)
        assert ids == [token for document in expected for token in document.tokens] + [7] * padding
        assert mask == [bool(on) for document in expected for on in document.loss_mask] + [False] * padding


def test_rows_from_any_place_are_those_of_an_uninterrupted_run() -> None:
    whole = [facts(row) for row in SOURCE.rows(epochs=3)]
    assert len(whole) == sum(SOURCE.number_of_rows(epoch) for epoch in range(3))
    place = 0
    for epoch in range(3):
        for number in range(SOURCE.number_of_rows(epoch) + 1):
            if number % 5 == 0 or number == SOURCE.number_of_rows(epoch):
                anew = RowSource(corpus(LENGTHS), budget=100, max_documents=4, seed=3, padding_id=7)
                rest = [facts(row) for row in itertools.islice(anew.rows(epoch, number, epochs=3), 3)]
                assert rest == whole[place + number : place + number + 3]
        place += SOURCE.number_of_rows(epoch)


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("number", [0, 4, 5])
def test_workers_share_the_rows_without_overlap(workers: int, number: int) -> None:
    whole = [(row.epoch, row.number) for row in SOURCE.rows(1, number, epochs=3)]
    shares = [
        [(row.epoch, row.number) for row in SOURCE.rows(1, number, worker=worker, workers=workers, epochs=3)]
        for worker in range(workers)
    ]
    assert sorted(itertools.chain(*shares)) == whole
    for worker, share in enumerate(shares):
        assert {number % workers for _, number in share} == {worker}


def test_nothing_to_train_on_points_to_the_report() -> None:
    with pytest.raises(ValueError, match="data report"):
        RowSource(Corpus([]), budget=8, max_documents=2, seed=0)


def test_corpus_keeps_documents_as_they_are_and_cannot_be_written_to() -> None:
    documents = corpus([3, 1, 5])
    assert documents.lengths == (3, 1, 5)
    assert [document.tokens.tolist() for document in documents[1:]] == [
        [1000],
        [2000, 2001, 2002, 2003, 2004],
    ]
    assert documents[-1].source == "corpus:2"
    assert documents[-1].loss_mask.tolist() == [False, True, True, False, True]
    with pytest.raises(ValueError, match="read-only"):
        documents[0].tokens[0] = 5
    with pytest.raises(IndexError):
        documents[3]
