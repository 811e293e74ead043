"""Files of every form become documents, split and counted; what cannot be used is named by its place."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from dflash.data import files
from dflash.data.corpus import Corpus
from dflash.data.held_out import is_held_out
from dflash.data.loading import BadData, LoadedData, LoadOptions, load_documents

from tests.payload.chat_tokenizers import CHATML, bytes_tokenizer, decoded, words_tokenizer

TOKENIZER = bytes_tokenizer()
MESSAGES = {
    "messages": [{"role": "user", "content": "what is it"}, {"role": "assistant", "content": "the answer"}]
}
SHARED = {
    "id": "x_0",
    "conversations": [{"from": "human", "value": "what is it"}, {"from": "gpt", "value": "the answer"}],
}
IDS = {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 1, 1, 0]}


def load(*paths: Path, vocab_size: int = 1000, tokenizer: Any = TOKENIZER, **options: Any) -> LoadedData:
    given = LoadOptions(**{"max_document_tokens": 64, **options})
    return load_documents(paths, options=given, tokenizer=tokenizer, vocab_size=vocab_size)


def write(path: Path, records: Iterable[Any]) -> Path:
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def values(corpus: Corpus) -> list[tuple[list[int], list[bool]]]:
    return [(document.tokens.tolist(), document.loss_mask.tolist()) for document in corpus]


def sources(corpus: Corpus) -> list[str]:
    return [document.source for document in corpus]


def test_both_forms_of_conversations_are_the_same_document(tmp_path: Path) -> None:
    file = write(tmp_path / "my talk.jsonl", [MESSAGES, "", SHARED])
    found = load(file)
    messages, shared = values(found.train)
    assert messages == shared
    assert sources(found.train) == [f"{file}:1", f"{file}:3"]
    assert not found.report.dropped
    learnt = [token for token, on in zip(*messages, strict=True) if on]
    assert decoded(TOKENIZER, learnt) == "the answer<|im_end|>"


def test_text_is_learnt_whole_but_for_tokens_that_the_tokenizer_adds(tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("the answer\nis yes", encoding="utf-8")
    write(tmp_path / "texts.jsonl", [{"text": "the answer\nis yes"}])
    note, line = values(load(tmp_path).train)
    assert note == line
    assert decoded(TOKENIZER, note[0]) == "the answer\nis yes"
    assert all(note[1])
    words = words_tokenizer()
    tokens, mask = values(load(tmp_path / "note.txt", tokenizer=words).train)[0]
    assert (tokens[0] == words.bos_token_id, mask[0], set(mask[1:])) == (True, False, {True})


@pytest.mark.parametrize("form", ["jsonl", "parquet", "arrow", "folder"])
def test_token_ids_come_from_every_container(form: str, tmp_path: Path) -> None:
    rows = [IDS, {"input_ids": [9, 9], "loss_mask": [1, 1]}]
    table = datasets.Dataset.from_list(rows)
    path = tmp_path / f"rows.{form}"
    if form == "jsonl":
        write(path, rows)
    elif form == "parquet":
        table.to_parquet(path)
    else:
        table.save_to_disk(tmp_path / "rows.folder")
    if form == "arrow":
        path = next((tmp_path / "rows.folder").glob("*.arrow"))
    found = load(path, tokenizer=None)
    assert values(found.train) == [
        ([5, 6, 7, 8], [False, True, True, False]),
        ([9, 9], [True, True]),
    ]
    assert sources(found.train) == [f"{path}:1", f"{path}:2"]


def test_table_may_hold_conversations(tmp_path: Path) -> None:
    datasets.Dataset.from_list([MESSAGES, MESSAGES]).to_parquet(tmp_path / "chats.parquet")
    direct = values(load(write(tmp_path / "one.jsonl", [MESSAGES])).train)
    assert values(load(tmp_path / "chats.parquet").train) == direct * 2


def test_folder_is_read_in_path_order_and_saved_datasets_as_one(tmp_path: Path) -> None:
    write(tmp_path / "b.jsonl", [IDS])
    (tmp_path / "a" / ".cache").mkdir(parents=True)
    write(tmp_path / "a" / ".cache" / "z.jsonl", [IDS])
    write(tmp_path / "a" / "c.jsonl", [IDS])
    (tmp_path / "a" / "README").write_text("not data")
    datasets.Dataset.from_list([IDS]).save_to_disk(tmp_path / "aa")
    found = load(tmp_path)
    assert sources(found.train) == [f"{tmp_path}/{name}:1" for name in ("a/c.jsonl", "aa", "b.jsonl")]
    assert found.report.files == 3


BAD_LINES = [
    ('{"messages": [', "is no JSON: Expecting value at column 15"),
    ("[1, 2]", "holds a JSON list, not an object"),
    ("[" * 100_000, "is no JSON that can be read"),
    ({"message": []}, "has 'message'; expected one of messages, conversations, text, prompt"),
    ({}, "has nothing; expected one of"),
    ({"messages": []}, "messages is no list of turns"),
    ({"messages": ["hi"]}, r"messages\[0\] is no object"),
    ({"messages": [{"role": "user"}]}, r"messages\[0\].content is NoneType, not a string"),
    ({"conversations": [{"from": "x", "value": "x"}]}, r"conversations\[0\].from is 'x'; known: human"),
    ({"messages": [{"role": ["user"], "content": "x"}]}, r"messages\[0\].role is \['user'\]; known: human"),
    ({"text": 5}, "text is int, not a string"),
    ({"text": "a\ud800"}, r"text holds half a character, '.ud800'"),
    ({"messages": [{"role": "user", "content": "\udfff"}]}, r"messages\[0\].content holds half a character"),
    ({"input_ids": [1, 2]}, "has input_ids without loss_mask"),
    ({"input_ids": [1, 2], "loss_mask": [1]}, "has 2 input_ids and a loss_mask of 1"),
    ({"input_ids": [1, 2], "loss_mask": [1, 2]}, "loss_mask holds other numbers than 0 and 1"),
    ({"input_ids": [1, 2.5], "loss_mask": [1, 1]}, "input_ids is no list of integers"),
    ({"input_ids": [1, 10**30], "loss_mask": [1, 1]}, "more than 64 bits"),
    ({"input_ids": [-1, 1], "loss_mask": [1, 1]}, "input_ids holds -1 … 1"),
    ({"input_ids": [1, 1000], "loss_mask": [1, 1]}, "holds 1000; the target's vocabulary ends at 999"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "problem"), BAD_LINES)
def test_bad_line_is_named_counted_and_fatal_only_when_strict(
    line: Any, problem: str, tmp_path: Path
) -> None:
    file = write(tmp_path / "data.jsonl", [IDS, line, IDS])
    found = load(file)
    assert sources(found.train) == [f"{file}:1", f"{file}:3"]
    assert found.report.dropped == {"bad line": 1}
    (example,) = found.report.examples["bad line"]
    assert example.startswith(f"{file}:2: ")
    with pytest.raises(BadData, match=rf"data.jsonl:2: .*{problem}.*load without strict"):
        load(file, strict=True)


def test_line_that_is_not_utf8_is_a_bad_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "\xff\xff"}\n' + json.dumps(IDS).encode())
    (tmp_path / "b.txt").write_bytes(b"yes \xff")
    report = load(tmp_path).report
    assert (report.dropped, report.train.documents) == ({"bad line": 2}, 1)
    assert report.examples["bad line"] == [
        f"{tmp_path}/a.jsonl:1: is not UTF-8 at byte 10 of the line",
        f"{tmp_path}/b.txt: is not UTF-8 at byte 4",
    ]


def test_conversation_that_the_template_refuses_is_counted_or_fatal(tmp_path: Path) -> None:
    system = {"messages": [{"role": "system", "content": "be kind"}, *MESSAGES["messages"]]}
    file = write(tmp_path / "data.jsonl", [MESSAGES, system])
    found = load(file, tokenizer=words_tokenizer())
    assert found.report.dropped == {"refused by the chat template": 1}
    assert "Only user and assistant roles" in found.report.examples["refused by the chat template"][0]
    with pytest.raises(BadData, match=r"data.jsonl:2: .*Only user and"):
        load(file, tokenizer=words_tokenizer(), strict=True)


def document(length: int, start: int = 0) -> dict[str, Any]:
    return {"input_ids": list(range(length)), "loss_mask": [int(token >= start) for token in range(length)]}


def test_long_documents_are_cut_and_kept_while_a_pair_is_left(tmp_path: Path) -> None:
    file = write(tmp_path / "data.jsonl", [document(8), document(12, 6), document(12, 7)])
    found = load(file, max_document_tokens=8)
    assert values(found.train)[1] == (list(range(8)), [False] * 6 + [True] * 2)
    assert (found.train.lengths, found.report.truncated) == ((8, 8), 1)
    assert found.report.dropped == {"no trainable pair": 1}
    assert found.report.examples == {
        "truncated": [f"{file}:2: 12 tokens, cut to 8"],
        "no trainable pair": [f"{file}:3: no two tokens of an answer in a row within its first 8 tokens"],
    }


def test_long_documents_are_dropped_where_asked(tmp_path: Path) -> None:
    file = write(tmp_path / "data.jsonl", [document(8), document(9)])
    found = load(file, max_document_tokens=8, long_documents="drop")
    assert found.train.lengths == (8,)
    assert found.report.examples == {"too long": [f"{file}:2: 9 tokens, at most 8"]}


@pytest.mark.parametrize("mask", [[0, 0, 0, 0], [1, 0, 1, 0], [0, 0, 0, 1]])
def test_document_without_a_trainable_pair_is_dropped(mask: list[int], tmp_path: Path) -> None:
    file = write(tmp_path / "data.jsonl", [{"input_ids": [1, 2, 3, 4], "loss_mask": mask}])
    assert load(file).report.dropped == {"no trainable pair": 1}


def test_conversation_without_an_answer_and_empty_documents_have_no_pair(tmp_path: Path) -> None:
    records = [{"prompt": "what"}, {"text": ""}, {"input_ids": [], "loss_mask": []}]
    assert load(write(tmp_path / "data.jsonl", records)).report.dropped == {"no trainable pair": 3}


def test_report_counts_everything_and_shows_the_first_of_each_reason(tmp_path: Path) -> None:
    records = [IDS, *["broken"] * 5, document(70), MESSAGES]
    file = write(tmp_path / "data.jsonl", records)
    report = load(file).report
    tokens = 4 + 64 + load(write(tmp_path / "alone.jsonl", [MESSAGES])).train.lengths[0]
    assert report.as_json()["train"] == {
        "documents": 3,
        "tokens": tokens,
        "answer_tokens": 2 + 64 + len(TOKENIZER("the answer")["input_ids"]) + 1,
    }
    assert [example.split(": ")[0] for example in report.examples["bad line"]] == [
        f"{file}:{line}" for line in (2, 3, 4)
    ]
    text = report.as_text()
    assert text.startswith("data: 8 records in 1 files; template ")
    assert "dropped 5: bad line\n" in text
    assert f"kept 1: truncated\n    {file}:7: 70 tokens, cut to 64" in text
    json.dumps(report.as_json())


def test_held_out_share_is_the_same_documents_in_any_order_and_company(tmp_path: Path) -> None:
    records = [{"text": f"the answer is {number}"} for number in range(300)]
    whole = load(write(tmp_path / "data.jsonl", records), held_out_share=0.1)
    held_out = {decoded(TOKENIZER, document.tokens) for document in whole.held_out}
    assert 15 <= len(held_out) <= 45
    assert whole.report.held_out.documents + whole.report.train.documents == 300
    half = load(write(tmp_path / "half.jsonl", records[::-2]), held_out_share=0.1)
    kept = {record["text"] for record in records[::-2]}
    assert {decoded(TOKENIZER, document.tokens) for document in half.held_out} == held_out & kept
    more = load(tmp_path / "data.jsonl", held_out_share=0.2)
    assert held_out < {decoded(TOKENIZER, document.tokens) for document in more.held_out}
    other = bytes_tokenizer(CHATML.replace("Be kind.", "Be brief."))
    assert len(load(tmp_path / "data.jsonl", held_out_share=0.1, tokenizer=other).held_out) == len(held_out)


def test_documents_of_one_key_stay_on_one_side(tmp_path: Path) -> None:
    records = [
        {"key": f"about {number % 20}", "input_ids": [number, 1, 2], "loss_mask": [0, 1, 1]}
        for number in range(200)
    ]
    found = load(write(tmp_path / "data.jsonl", records), held_out_share=0.3)
    sides = [{document.tokens[0] % 20 for document in side} for side in (found.train, found.held_out)]
    assert sides[0] | sides[1] == set(range(20))
    assert not sides[0] & sides[1]
    assert sides[1] == {number for number in range(20) if is_held_out(f"about {number}", 0.3)}


def test_lines_are_taken_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "data.jsonl", [IDS] * 3)
    entries = files.read_entries([file])
    assert next(entries).place == f"{file}:1"
    with file.open("a") as more:
        more.write(" " * 200_000 + json.dumps(IDS) + "\n")
    assert [entry.place for entry in entries] == [f"{file}:{line}" for line in (2, 3, 4)]


def test_same_files_give_the_same_documents(tmp_path: Path) -> None:
    write(tmp_path / "data.jsonl", [MESSAGES, SHARED, IDS, {"text": "yes, the answer"}])
    one, other = load(tmp_path), load(tmp_path)
    assert values(one.train) == values(other.train)
    assert one.report.as_json() == other.report.as_json()


def test_paths_that_cannot_be_read_are_refused_before_anything_is(tmp_path: Path) -> None:
    (tmp_path / "data.csv").write_text("a,b")
    (tmp_path / "empty").mkdir()
    write(tmp_path / "list.json", ["[", '{"text": "x"}', "]"])
    for path, words in {
        "nowhere.jsonl": "no such file or folder",
        "data.csv": "rename it to one of .jsonl",
        "empty": "no data in the folder",
        "list.json": r"one JSON list, .* jq -c '.\[\]' list.json > list.jsonl",
    }.items():
        with pytest.raises(ValueError, match=words):
            load(tmp_path / path)


@pytest.mark.parametrize("name", ["broken.parquet", "broken.arrow"])
def test_broken_table_names_its_file(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"PAR1 no table" * 10)
    with pytest.raises(ValueError, match=f"cannot read .*{name}"):
        load(tmp_path / name)


def test_conversation_without_a_tokenizer_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="need the target's tokenizer"):
        load(write(tmp_path / "data.jsonl", [MESSAGES]), tokenizer=None)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_document_tokens": 0}, "max_document_tokens is 0"),
        ({"long_documents": "split"}, "unknown long_documents 'split'; known: drop, truncate"),
        ({"held_out_share": 1.0}, "held_out_share is 1.0"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        LoadOptions(**{"max_document_tokens": 8, **options})


def test_long_texts_make_no_noise_about_the_tokenizers_own_limit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = bytes_tokenizer()
    tokenizer.model_max_length = 4
    records = [{"text": "the answer is yes and no"}, MESSAGES]
    found = load(write(tmp_path / "data.jsonl", records), tokenizer=tokenizer)
    assert min(found.train.lengths) > 4
    assert np.all(np.array(found.train.lengths) <= 64)
    assert not caplog.records
