"""From chunks to lines and from lines to a terminal, against a splitter that sees the whole."""

from __future__ import annotations

import base64
import json
import re
import tracemalloc
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from orchestrator import log_lines, log_text
from orchestrator.errors import ProtocolError
from orchestrator.log_lines import LineAssembler, LogLine, select
from orchestrator.log_tail import tail
from orchestrator.log_text import LINE_LIMIT_BYTES, LineText
from orchestrator.log_view import line_json, render, waiting_note

RUN = "k3m9x2qa7bcd"
ESC = "\x1b"

# Few distinct bytes, so that line ends, returns and cut characters meet often.
outputs = st.lists(
    st.sampled_from([b"\n", b"\r", b"\r\n", b"a", b"bc", "é".encode(), "🙂".encode(), b"\xff", b"\xe2"])
).map(b"".join)
chunkings = st.lists(st.tuples(st.sampled_from(["stdout", "stderr"]), outputs.filter(bool)), max_size=12)


@dataclass
class Writer:
    """Makes records as a supervisor does, also from chunks that cut a character in two."""

    proc: str = "rank0"
    seq: int = 0
    seen: dict[str, bytes] = field(default_factory=dict)

    def out(self, stream: str, data: bytes) -> dict[str, Any]:
        before = self.seen.get(stream, b"")
        self.seen[stream] = before + data
        self.seq += 1
        try:
            value = {"text": data.decode()}
        except UnicodeDecodeError:
            value = {"b64": base64.b64encode(data).decode()}
        place = {"off": len(before), "line": before.count(b"\n")}
        who = {"proc": self.proc, "pid": 42, "stream": stream}
        return {"seq": self.seq, "t": float(self.seq), "kind": "out", **who, **place, **value}


def reference(data: bytes) -> list[str]:
    """What a reader of the whole stream would show."""
    *lines, rest = data.split(b"\n")
    shown = [line.rstrip(b"\r").rpartition(b"\r")[2] for line in lines]
    rest = rest.rstrip(b"\r").rpartition(b"\r")[2]
    return [line.decode("utf-8", "backslashreplace") for line in (*shown, *([rest] if rest else []))]


def assemble(records: list[dict[str, Any]]) -> list[LogLine]:
    lines = LineAssembler(host="pve-200", run_id=RUN)
    return [*(line for record in records for line in lines.feed(record)), *lines.flush()]


def texts(lines: list[LogLine], stream: str = "stdout") -> list[str]:
    return [line.text for line in lines if line.stream == stream]


def show(data: bytes, **changes: Any) -> str:
    line = assemble([Writer().out("stdout", data)])[0]
    return render(line, colour=bool(changes.get("colour")))


@given(chunkings)
def test_lines_are_those_of_the_whole_stream_however_it_was_chunked(chunks: list[tuple[str, bytes]]) -> None:
    writer = Writer()
    lines = assemble([writer.out(stream, data) for stream, data in chunks])
    for stream, whole in writer.seen.items():
        of_stream = [line for line in lines if line.stream == stream]
        assert [line.text for line in of_stream] == reference(whole)
        assert [line.number for line in of_stream] == list(range(1, len(of_stream) + 1))
        assert [line.is_finished for line in of_stream].count(True) == whole.count(b"\n")
        assert not any(line.is_headless or line.left_out_bytes for line in of_stream)


@given(st.lists(st.text(st.sampled_from("\n\nabé🙂"), min_size=1), min_size=1), st.integers(1, 9))
def test_plain_text_gives_the_same_lines_on_the_short_way(chunks: list[str], limit: int) -> None:
    writer = Writer()
    records = [writer.out("stdout", chunk.encode()) for chunk in chunks]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log_text, "LINE_LIMIT_BYTES", 4 * limit)
        streams: log_lines.Streams = {}
        source = log_lines.Source("pve-200", RUN)
        long_way = [
            source.show(line) for record in records for line in log_lines.assemble(record, streams, source)
        ]
        lines = LineAssembler(host="pve-200", run_id=RUN)
        assert [line for record in records for line in lines.feed(record)] == long_way
        assert list(lines.flush()) == [
            source.show(stream.line) for stream in streams.values() if stream.has_begun
        ]


@given(st.binary(), st.binary())
def test_any_bytes_at_all_are_split_alike(first: bytes, second: bytes) -> None:
    writer = Writer()
    lines = assemble([writer.out("stdout", part) for part in (first, second) if part])
    assert texts(lines) == reference(first + second)


@given(chunkings, st.lists(st.integers(1, 4), max_size=6), st.integers(0, 8))
def test_tail_finds_the_last_lines_and_goes_on_from_there(
    chunks: list[tuple[str, bytes]], sizes: list[int], count: int
) -> None:
    writer = Writer()
    records = [writer.out(stream, data) for stream, data in chunks]
    more = [writer.out("stdout", b"more\n"), writer.out("stderr", b"more\n")]
    ended = [line for line in assemble(records) if line.is_finished]
    last, lines = tail(newest_first(records, sizes), count, host="pve-200", run_id=RUN)
    assert last == ended[max(0, len(ended) - count) :]
    seen_all, seen_tail = LineAssembler(host="pve-200", run_id=RUN), lines
    for record in records:
        list(seen_all.feed(record))
    for record in more:
        for line, expected in zip(seen_tail.feed(record), seen_all.feed(record), strict=True):
            assert line.is_headless or line.text == expected.text


@given(chunkings, st.lists(st.integers(1, 4), max_size=6), st.integers(0, 8))
def test_tail_finds_the_last_lines_that_match(
    chunks: list[tuple[str, bytes]], sizes: list[int], count: int
) -> None:
    writer = Writer()
    records = [writer.out(stream, data) for stream, data in chunks]

    def matches(line: LogLine) -> bool:
        return "a" in line.text

    ended = [line for line in assemble(records) if line.is_finished and matches(line)]
    batches = newest_first(records, sizes)
    last, _ = tail(batches, count, host="pve-200", run_id=RUN, matches=matches)
    assert last == ended[max(0, len(ended) - count) :]


def test_tail_goes_on_to_the_beginning_of_a_newer_line_that_may_match() -> None:
    writer = Writer()
    old = [writer.out("stderr", b"this is wanted, ")]
    new = [writer.out("stdout", b"wanted\n"), writer.out("stderr", b"too\n")]
    last, _ = tail([new, old], 1, host="pve-200", run_id=RUN, matches=lambda line: "wanted" in line.text)
    assert texts(last, "stderr") == ["this is wanted, too"]


def newest_first(records: list[dict[str, Any]], sizes: list[int]) -> Iterator[Iterator[dict[str, Any]]]:
    segments, rest = [], records
    for size in sizes:
        segments.append(rest[:size])
        rest = rest[size:]
    yield from map(iter, reversed([*segments, rest]))


def test_tail_does_not_read_segments_that_cannot_matter() -> None:
    writer = Writer()
    old = [writer.out("stdout", b"old\n" * 5), writer.out("stderr", b"head ")]
    new = [writer.out("stdout", b"new\n" * 5), writer.out("stderr", b"tail\n")]

    def segments() -> Iterator[Iterator[dict[str, Any]]]:
        yield iter(new)
        yield iter(old)
        pytest.fail("a third segment was asked for")

    last, _ = tail(segments(), 3, host="pve-200", run_id=RUN)
    assert [(line.stream, line.text) for line in last] == [("stdout", "new")] * 2 + [("stderr", "head tail")]


def test_tail_of_a_stream_without_line_ends_needs_little_memory() -> None:
    writer = Writer()
    megabyte = "x" * 1024 * 1024
    record = writer.out("stdout", b"x")

    def segments() -> Iterator[Iterator[dict[str, Any]]]:
        for number in reversed(range(60)):
            yield iter(
                [{**record, "seq": number, "off": number * len(megabyte), "line": 0, "text": megabyte}]
            )

    tracemalloc.start()
    last, lines = tail(segments(), 5, host="pve-200", run_id=RUN)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert last == []
    assert [line.left_out_bytes for line in lines.flush()] == [60 * len(megabyte) - LINE_LIMIT_BYTES]
    assert peak_bytes < 16 * len(megabyte)


def test_tail_marks_a_line_whose_beginning_is_in_no_segment() -> None:
    writer = Writer()
    records = [writer.out("stdout", part) for part in (b"lost ", b"found\nnext\n")]
    last, _ = tail([records[1:]], 5, host="pve-200", run_id=RUN)
    assert [(line.text, line.is_headless) for line in last] == [("found", True), ("next", False)]
    assert render(last[0], colour=False).endswith("| [begins earlier …] found")


def test_records_that_are_missing_join_nothing() -> None:
    writer = Writer()
    records = [writer.out("stdout", part) for part in (b"begin ", b"middle\n", b"end\n")]
    del records[1]
    expected = [("begin ", False, False), ("end", True, True)]
    assert [(line.text, line.is_finished, line.is_headless) for line in assemble(records)] == expected
    last, _ = tail([records[1:], records[:1]], 5, host="pve-200", run_id=RUN)
    assert [(line.text, line.is_finished, line.is_headless) for line in last] == expected


def test_records_that_are_missing_do_not_confuse_what_follows_a_tail() -> None:
    writer = Writer()
    zero, begin, _, end = (
        writer.out("stdout", part) for part in (b"zero\n", b"begin ", b"middle\n", b"end\nop")
    )
    last, lines = tail([[end], [begin], [zero]], 5, host="pve-200", run_id=RUN)
    assert texts(last) == ["zero", "begin ", "end"]
    assert texts([*lines.feed(writer.out("stdout", b"en\n"))]) == ["open"]


def test_tail_needs_only_the_last_update_of_a_progress_bar() -> None:
    writer = Writer()
    writer.out("stderr", b"\r  1%" * 1000)
    last, _ = tail([[writer.out("stderr", b"\r 99%\r100%\n")]], 1, host="pve-200", run_id=RUN)
    assert [(line.text, line.is_headless) for line in last] == [("100%", False)]


def test_unended_lines_come_in_the_order_of_their_last_bytes() -> None:
    writer = Writer()
    steps = [("stdout", b"a"), ("stderr", b"b"), ("stdout", b"c")]
    lines = assemble([writer.out(stream, data) for stream, data in steps])
    assert [line.text for line in lines] == ["b", "ac"]


@given(st.lists(st.sampled_from([b"", b"\r", b"a", b"bc\r", b"\rd", b"e\rf"]), min_size=3, max_size=3))
def test_what_shows_of_a_line_does_not_depend_on_how_its_parts_are_joined(parts: list[bytes]) -> None:
    forward, backward = (list(map(LineText.of, parts)) for _ in range(2))
    forward[0].extend(forward[1])
    forward[0].extend(forward[2])
    backward[1].extend(backward[2])
    backward[0].extend(backward[1])
    whole = LineText.of(b"".join(parts))
    for joined in (forward[0], backward[0]):
        assert (joined.kept, joined.has_returned) == (whole.kept, whole.has_returned)


def test_a_progress_bar_shows_its_last_update_and_keeps_no_other() -> None:
    writer = Writer()
    bar = [f"\r{percent:3}%".encode() for percent in range(101)]
    records = [
        record for step in bar for record in (writer.out("stderr", step), writer.out("stdout", b"step\n"))
    ]
    lines = assemble([*records, writer.out("stderr", b"\r\n")])
    assert texts(lines, "stderr") == ["100%"]
    assert texts(lines) == ["step"] * 101


def test_two_streams_in_turn_keep_their_own_lines() -> None:
    writer = Writer()
    steps = [
        ("stdout", b"step 1 lo"),
        ("stderr", b"Warning: slow\n"),
        ("stdout", b"ss=0.5\n"),
        ("stderr", b"half"),
    ]
    lines = assemble([writer.out(stream, data) for stream, data in steps])
    assert [(line.name, line.text, line.is_finished) for line in lines] == [
        (f"{RUN}/rank0.stderr:1", "Warning: slow", True),
        (f"{RUN}/rank0.stdout:1", "step 1 loss=0.5", True),
        (f"{RUN}/rank0.stderr:2", "half", False),
    ]


def test_processes_of_one_stream_name_do_not_mix() -> None:
    one, two = Writer(proc="rank0"), Writer(proc="rank1")
    records = [
        one.out("stdout", b"a"),
        two.out("stdout", b"b"),
        one.out("stdout", b"a\n"),
        two.out("stdout", b"b\n"),
    ]
    assert [(line.proc, line.text) for line in assemble(records)] == [("rank0", "aa"), ("rank1", "bb")]
    assert texts(assemble(list(map(dict, select(records, proc="rank1"))))) == ["bb"]


def test_select_takes_output_of_the_named_source_only() -> None:
    writer = Writer()
    records = [writer.out("stdout", b"o\n"), {"kind": "heartbeat"}, writer.out("stderr", b"e\n")]
    assert [record["stream"] for record in select(records)] == ["stdout", "stderr"]
    assert [record["stream"] for record in select(records, stream="stderr")] == ["stderr"]
    assert list(select(records, proc="rank7")) == []


def test_an_unended_line_is_marked_and_named() -> None:
    assert show(b"one") == "pve-200 k3m9x2qa/rank0.stdout:1 | one [no line end]"
    assert show(b"one\r\n") == "pve-200 k3m9x2qa/rank0.stdout:1 | one"


def test_a_huge_line_is_cut_where_it_is_stated_and_says_how_much_is_missing() -> None:
    writer = Writer()
    lines = LineAssembler(host="pve-200", run_id=RUN)
    megabyte = "x" * 1024 * 1024
    record = writer.out("stdout", b"x")
    shown: list[LogLine] = []
    tracemalloc.start()
    for number in range(100):
        text = megabyte + ("\n" if number == 99 else "")
        shown += lines.feed({**record, "seq": number, "off": number * len(megabyte), "text": text})
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    (line,) = shown
    assert (len(line.text), line.left_out_bytes) == (LINE_LIMIT_BYTES, 100 * len(megabyte) - LINE_LIMIT_BYTES)
    assert render(line, colour=False).endswith(
        f"x [… {line.left_out_bytes} more bytes in runs/{RUN}/records, up to seq 99]"
    )
    assert peak_bytes < 16 * len(megabyte)


def test_a_line_of_many_small_chunks_is_kept_up_to_the_same_limit() -> None:
    writer = Writer()
    lines = LineAssembler(host="pve-200", run_id=RUN)
    record = writer.out("stdout", b"x")
    for number in range(3 * LINE_LIMIT_BYTES):
        assert not list(lines.feed({**record, "off": number, "text": "x"}))
    (line,) = lines.flush()
    assert (len(line.text), line.left_out_bytes) == (LINE_LIMIT_BYTES, 2 * LINE_LIMIT_BYTES)


@given(st.integers(1, 12), st.lists(st.sampled_from(["é", "🙂", "a", "€"]), min_size=1, max_size=12))
def test_the_cut_falls_between_characters_and_counts_every_byte(limit: int, letters: list[str]) -> None:
    data = "".join(letters).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log_text, "LINE_LIMIT_BYTES", limit)
        (line,) = assemble([Writer().out("stdout", data + b"\n")])
    assert data.decode().startswith(line.text)
    assert len(line.text.encode()) + line.left_out_bytes == len(data)
    assert len(line.text.encode()) > limit - 4 or not line.left_out_bytes


@pytest.mark.parametrize(
    ("payload", "shown"),
    [
        (f"{ESC}[31mred{ESC}[0m", "\\x1b[31mred\\x1b[0m"),
        (f"{ESC}]0;title\x07", "\\x1b]0;title\\x07"),
        (f"{ESC}[2J{ESC}[H", "\\x1b[2J\\x1b[H"),
        ("\x9b31m\x9d0;t\x9c", "\\x9b31m\\x9d0;t\\x9c"),
        ("abc\u202edcba\u2066x\u200f", "abc\\u202edcba\\u2066x\\u200f"),
        ("nul\0 bell\a back\b vt\v ff\f", "nul\\x00 bell\\x07 back\\x08 vt\\x0b ff\\x0c"),
        ("next\x85line\u2028separator", "next\\x85line\\u2028separator"),
        ("tab\tstays, é and 🙂 too", "tab\tstays, é and 🙂 too"),
        ("[bold]markup[/bold] :smile:", "[bold]markup[/bold] :smile:"),
    ],
)
def test_nothing_of_a_payload_acts_on_the_terminal(payload: str, shown: str) -> None:
    assert show(payload.encode() + b"\n").partition(" | ")[2] == shown
    assert f"{shown}" in show(payload.encode() + b"\n", colour=True)


def test_bytes_that_are_not_utf8_are_shown_escaped() -> None:
    assert show("naïve ".encode("latin-1") + b"\xff\n").endswith(" | na\\xefve \\xff")


def test_a_lone_surrogate_in_a_record_is_shown_escaped() -> None:
    record = {**Writer().out("stdout", b"x\n"), "text": "a\udcffb\n"}
    assert assemble([record])[0].text.isascii()


@given(st.text(), st.sampled_from(["stdout", "stderr", "\x1b[31m"]), st.booleans())
def test_a_rendered_line_is_one_line_of_printable_text(text: str, stream: str, colour: bool) -> None:
    record = {**Writer(proc=f"rank{ESC}[2J").out(stream, b"x"), "text": text.replace("\n", "") + "\n"}
    rendered = render(assemble([record])[0], colour=colour)
    for code in ("\x1b[0m", "\x1b[2m", "\x1b[33m", "\x1b[36m") if colour else ():
        rendered = rendered.replace(code, "")
    hidden = {unicodedata.category(character) for character in rendered.replace("\t", "")}
    assert not hidden & {"Cc", "Cf", "Cs", "Zl", "Zp"}


def test_the_long_form_adds_pid_and_time_to_the_name() -> None:
    line = assemble([Writer().out("stderr", b"text\n")])[0]
    shown = render(line, colour=False, is_long=True)
    assert shown == "pve-200 k3m9x2qa/rank0.stderr:1 pid 42 1970-01-01T00:00:01.000Z | text"
    assert "t=1e+300" in render(line._replace(t=1e300), colour=False, is_long=True)


def test_streams_differ_in_colour_and_the_text_has_none() -> None:
    writer = Writer()
    out, err = (
        render(assemble([writer.out(name, b"text\n")])[0], colour=True) for name in ("stdout", "stderr")
    )
    assert out.split("pve")[0] != err.split("pve")[0]
    assert out.endswith("\x1b[0m text")


def test_json_of_a_line_says_where_it_is_from_and_survives_a_strict_reader() -> None:
    form = line_json(assemble([Writer().out("stderr", f"{ESC}[31m\u202e\xff\n".encode())])[0])
    text = json.dumps(form, allow_nan=False)
    assert text.isascii()
    assert json.loads(text) == form
    expected = {
        "name": f"{RUN}/rank0.stderr:1",
        "host": "pve-200",
        "run_id": RUN,
        "proc": "rank0",
        "pid": 42,
        "seq": 1,
    }
    assert expected.items() <= form.items()
    assert form["text"] == f"{ESC}[31m\u202e\xff"


@pytest.mark.parametrize(
    "change", [{"b64": "%"}, {"text": 5}, {"off": "0"}, {"proc": None}, {"t": "now"}, {"line": 1.5}]
)
def test_a_record_that_breaks_the_format_is_an_error_with_its_number(change: dict[str, Any]) -> None:
    record = Writer().out("stdout", b"x\n") | change
    with pytest.raises(ProtocolError, match=rf"pve-200: run {RUN}: record 1 has no valid "):
        assemble([record])


def seen_on_a_terminal(row: str) -> str:
    return re.sub(r"\x1b\[\d+m", "", row)


@given(st.text(max_size=300), st.integers(20, 90), st.booleans())
def test_a_line_that_wraps_goes_on_in_rows_that_no_source_begins(
    text: str, columns: int, colour: bool
) -> None:
    line = LogLine("here", RUN, "main", 42, "stdout", 1, 1, 1.0, text)
    first, *others = seen_on_a_terminal(render(line, colour=colour, columns=columns)).split("\n")
    assert first.startswith("here k3m9x2qa")
    assert all(row.startswith("    ") for row in others)
    assert all(cell_len(row.replace("\t", 8 * " ")) <= columns for row in (first, *others))
    whole = seen_on_a_terminal(render(line, colour=colour))
    assert first + "".join(row.removeprefix("    ") for row in others) == whole


def test_a_payload_cannot_wrap_its_way_to_a_source_of_its_own() -> None:
    forged = "other zzzzzzzz/main.stdout:1 | all is well"
    prefix = len("here k3m9x2qa/main.stdout:1 | ")
    line = LogLine("here", RUN, "main", 42, "stdout", 1, 1, 1.0, " " * (80 - prefix) + forged)
    assert render(line, colour=False, columns=80).split("\n")[1] == f"    {forged}"


def test_runs_differ_in_colour_and_their_streams_do_not() -> None:
    writer = Writer()
    lines = assemble([writer.out("stdout", b"a\n"), writer.out("stderr", b"b\n")])
    begins = [[render(line, colour=True, run=run).split("rank0")[0] for line in lines] for run in range(3)]
    assert all(of_run[0] == of_run[1] for of_run in begins)
    assert len({of_run[0] for of_run in begins}) == 3


def test_who_waits_and_for_whom_is_said() -> None:
    queued = {"kind": "queued", "queue": "g-1", "place": 2, "ahead": ["run1", "run2"]}
    assert waiting_note(queued, RUN) == f"run {RUN} waits for its turn in g-1, behind run1, run2"
    assert waiting_note({"kind": "turn", "waited_s": 12.3}, RUN) == f"the turn of run {RUN} came after 12 s"
    awaited = {
        "kind": "cards_awaited",
        "obstacles": ["card 0 is held by run r1", "card 1 has 9.0 GiB in use"],
    }
    assert waiting_note(awaited, RUN) == (
        f"run {RUN} waits for its cards: card 0 is held by run r1; card 1 has 9.0 GiB in use"
    )
    assert waiting_note({"kind": "cards", "waited_s": 61.0}, RUN) == f"run {RUN} has its cards after 61 s"
    assert waiting_note({"kind": "cards", "waited_s": 0.04}, RUN) is None
    assert waiting_note({"kind": "spawn"}, RUN) is None
    assert waiting_note({"kind": "queued"}, RUN) is not None  # a host may say anything
    preparing = {"kind": "preparing", "by": "run3", "file": "a/r.txt"}
    assert waiting_note(preparing, RUN) == f"run {RUN} waits until run run3 has prepared a/r.txt"
    used = {"kind": "preparing", "by": None, "file": "r.txt", "users": ["run1", "run2"]}
    assert waiting_note(used, RUN) == f"run {RUN} waits for runs that use r.txt: run1, run2"
    assert waiting_note({**used, "users": []}, RUN) == f"run {RUN} waits for runs that use r.txt"
    assert waiting_note({**preparing, "left": True}, RUN) == (
        f"run {RUN} waits for what is left of run run3, which was to prepare a/r.txt; "
        "`orch cancel run3` ends that"
    )
    assert waiting_note({"kind": "preparing"}, RUN) is not None
