"""Memory snapshots from hosts: plain containers are read, and hostile pickles do nothing but be refused."""

from __future__ import annotations

import builtins
import os
import pickle
import pickletools
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.cli.explain import explain
from orchestrator.errors import UsageError
from orchestrator.forensics import plain_pickle
from orchestrator.forensics.plain_pickle import PickleRefused
from orchestrator.forensics.snapshot import read_snapshot, summarise
from orchestrator.supervisor.memory_files import MOST_SNAPSHOT_BYTES, MemoryFiles
from tests.supervisor.snapshots import MIB, OPTIMIZER, OUTER, Allocator, in_module, without_addresses

ATTEND = ("/root/code/attention.py", 61, "scores")
PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(PLAIN, st.sampled_from([3, 4, 5]))
@settings(max_examples=25, deadline=None)
def test_plain_values_are_read_as_pickle_reads_them(value: Any, protocol: int) -> None:
    assert plain_pickle.read(pickle.dumps(value, protocol)) == value


def test_bytes_that_look_like_opcodes_inside_texts_and_numbers_are_no_opcodes() -> None:
    value = {"c" * 300: "cos\nsystem\n", "R": [0x6352, 0x80635228, 2**60 + 0x52, 0.1], "b": b"\x93R."}
    assert plain_pickle.read(pickle.dumps(value, 4)) == value


class Calls:
    """Pickles as the call of a function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return self._call


class Plainly(dict[str, Any]):
    pass


def framed(*opcodes: bytes) -> bytes:
    return b"\x80\x04" + b"".join(opcodes) + b"."


HOSTILE = {
    "a call": (pickle.dumps({"segments": Calls(os.system, "touch owned")}, 4), "STACK_GLOBAL.*system"),
    "a call, old style": (pickle.dumps([Calls(os.system, "touch owned")], 2), "GLOBAL '(posix|nt)' 'system'"),
    "eval": (pickle.dumps(Calls(builtins.eval, "1"), 4), "STACK_GLOBAL 'builtins' 'eval'"),
    "a class": (pickle.dumps(Plainly(), 4), "STACK_GLOBAL"),
    "a set": (pickle.dumps({1, 2}, 4), "EMPTY_SET"),
    "a text protocol": (pickle.dumps({"a": 1}, 0), "protocol 2 or later"),
    "a protocol to come": (b"\x80\x06N.", "protocol 6"),
    "an extension": (framed(b"\x82\x01"), "EXT1"),
    "a persistent id": (framed(b"Pname\n"), "PERSID"),
    "a buffer out of band": (framed(b"\x97"), "NEXT_BUFFER"),
    "an instance": (framed(b"(ios\nsystem\n"), "INST 'os' 'system'"),
    "a second protocol": (framed(b"\x80\x02N"), "PROTO"),
    "no opcode": (framed(b"\xff"), "0xff is no opcode"),
    "nothing": (b"", "does not begin"),
    "half of it": (pickle.dumps({"a": [1, 2, 3]}, 4)[:-5], "."),
    "no end": (b"\x80\x04N", "without its STOP"),
    "more behind its end": (b"\x80\x04N.cos\nsystem\n", "follows its end"),
    "an integer of kilobytes": (framed(b"\x8b", struct.pack("<i", 9000), b"\x01" * 9000), "LONG4"),
    "an integer of a hundred bytes": (framed(b"\x8a\x64", b"\x01" * 100), "LONG1"),
    "a memo of gigabytes": (framed(b"Nr\xff\xff\xff\x7f"), "LONG_BINPUT"),
    "a text of exabytes": (framed(b"\x8d", struct.pack("<Q", 2**62)), "bytes are to follow"),
    "bytes of exabytes": (framed(b"\x8e", struct.pack("<Q", 2**63)), "bytes are to follow"),
    "a frame of exabytes": (framed(b"\x95", struct.pack("<Q", 2**62), b"N"), "damaged"),
    "a memo that is empty": (framed(b"h\x07"), "damaged"),
    "a stack that is empty": (framed(b"s"), "damaged"),
    "a mark that is missing": (framed(b"e"), "damaged"),
    "tuples in each other": (framed(b")" + b"\x85" * 100_000), "TUPLE1"),
    "a tuple of lists": (pickle.dumps(([],), 4), "TUPLE1"),
    "a list as a key": (framed(b"}]Ns"), "damaged"),
    "lists in each other": (framed(b"]" * 100_000 + b"a" * 99_999), "deep"),
    "a list in itself": (framed(b"]\x94h\x00a"), "holds itself"),
    "dictionaries by the million": (framed(b"]" + b"(" + b"}" * 9_000_000 + b"e"), "containers"),
}


@pytest.mark.parametrize(("data", "says"), HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_pickle_is_refused_with_its_place_and_does_nothing(
    data: bytes, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PickleRefused, match=rf"^byte \d+: .*{says}"):
        plain_pickle.read(data)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name",
    [
        "GLOBAL",
        "STACK_GLOBAL",
        "INST",
        "OBJ",
        "NEWOBJ",
        "NEWOBJ_EX",
        "REDUCE",
        "BUILD",
        "PERSID",
        "BINPERSID",
        "EXT1",
        "EXT2",
        "EXT4",
        "NEXT_BUFFER",
        "READONLY_BUFFER",
    ],
)
def test_every_opcode_that_looks_something_up_or_calls_it_is_refused(name: str) -> None:
    (code,) = (each.code for each in pickletools.opcodes if each.name == name)
    with pytest.raises(PickleRefused, match=f": {name}"):
        plain_pickle.read(framed(b"N", code.encode("latin-1"), b"\x00" * 8))


def test_texts_without_end_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_pickle, "MOST_TEXTS", 1000)
    assert plain_pickle.read(pickle.dumps([str(number) for number in range(1000)], 4))
    with pytest.raises(PickleRefused, match="more than 1000 texts"):
        plain_pickle.read(pickle.dumps([str(number) for number in range(1001)], 4))


def test_sharing_without_end_costs_nothing() -> None:
    value: list[Any] = []
    for _ in range(plain_pickle.MOST_DEPTH - 1):
        value = [value] * 100
    assert plain_pickle.read(pickle.dumps(value, 4))[0] is not None


def snapshot() -> dict[str, Any]:
    allocator = Allocator()
    allocator.alloc(4 * MIB, OPTIMIZER, *OUTER)
    allocator.free(allocator.alloc(300 * MIB, *in_module(ATTEND)))
    allocator.fail(9 * MIB, 0)
    return allocator.snapshot(1, inactive=[300 * MIB])


def test_snapshot_that_the_payloads_process_keeps_is_summed_up_here(tmp_path: Path) -> None:
    written = MemoryFiles(str(tmp_path), "main").write_snapshot(1, snapshot(), float("inf"))
    found = read_snapshot(tmp_path / written)
    assert found == snapshot()
    (card,) = summarise(found)
    assert (card.device, card.reserved_bytes, card.largest_free_bytes) == (1, 304 * MIB, 300 * MIB)
    assert (card.now.allocated_bytes, card.now.by_category) == (4 * MIB, {"optimizer_state": 4 * MIB})
    assert card.peak.by_category == {"scores": 300 * MIB, "optimizer_state": 4 * MIB}
    assert card.peak.largest[0].where == "attention.py:61 scores"


def test_explain_shows_what_a_snapshot_holds_without_running_anything_in_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / MemoryFiles(str(tmp_path), "main").write_snapshot(1, snapshot(), float("inf"))
    assert explain.main(["--snapshot", str(file)], standalone_mode=False) == 0
    first, taken, *_, peak, largest, _ = capsys.readouterr().out.splitlines()
    assert first == "cuda:1       0.30 GiB reserved, 0.29 GiB free in one piece"
    assert taken == "when taken   4.0 MiB allocated: optimizer_state 4.0 MiB"
    assert peak == "at the peak  0.30 GiB allocated: scores 0.29 GiB, optimizer_state 4.0 MiB"
    assert largest.split() == ["300.0", "MiB", "scores", "at", "attention.py:61", "scores", "(forward)"]


def test_what_a_snapshot_says_cannot_act_on_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = snapshot()
    for segment in taken["segments"]:
        for block in segment["blocks"]:
            block["frames"] = [{"filename": "/x/\x1b[2Ja.py", "line": 1, "name": "f\x07"}]
    file = tmp_path / "hostile.pickle"
    file.write_bytes(pickle.dumps(taken))
    assert explain.main(["--snapshot", str(file)], standalone_mode=False) == 0
    assert not {"\x1b", "\x07"} & set(capsys.readouterr().out)


def test_older_form_is_summed_up_too(tmp_path: Path) -> None:
    path = tmp_path / "old.pickle"
    path.write_bytes(pickle.dumps(without_addresses(snapshot())))
    (card,) = summarise(read_snapshot(path))
    assert card.now.by_category == {"optimizer_state": 4 * MIB}


def test_snapshot_of_a_process_that_used_no_card_is_read(tmp_path: Path) -> None:
    path = tmp_path / "torch.pickle"
    taken = {
        "segments": [],
        "device_traces": [[]],
        "allocator_settings": {"roundup": {"1": 0}},
        "external_annotations": [],
    }
    path.write_bytes(pickle.dumps({**taken, "version": "2.13"}))
    assert summarise(read_snapshot(path)) == ()


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ([], "it is no dictionary"),
        ({"segments": {}}, "segments is no list"),
        ({"segments": [1]}, "segments holds something else than dictionaries"),
        ({"segments": [{"address": 1, "total_size": "x"}]}, "a segment has 'x' as its total_size"),
        ({"segments": [{"address": 1, "total_size": -1}]}, "a segment has -1 as its total_size"),
        ({"segments": [{"address": 1, "total_size": 1, "device": True}]}, "a segment has True as its device"),
        ({"segments": [], "device_traces": [7]}, "device_traces is no list"),
        ({"segments": [], "device_traces": [[{"action": "alloc"}]]}, "an event has None as its size"),
        (
            {
                "segments": [],
                "device_traces": [[{"action": "x", "frames": [{"line": 1, "name": "\x1b[2J"}]}]],
            },
            "a frame has None as its filename",
        ),
        (
            {
                "segments": [
                    {"address": 1, "total_size": 1, "blocks": [{"size": 1, "state": "\x1b[2J", "frames": 3}]}
                ]
            },
            "frames is no list",
        ),
    ],
)
def test_other_form_is_refused_with_what_is_odd(changed: Any, says: str, tmp_path: Path) -> None:
    path = tmp_path / "odd.pickle"
    path.write_bytes(pickle.dumps(changed))
    with pytest.raises(UsageError, match="is no memory snapshot that can be read") as caught:
        read_snapshot(path)
    assert says in str(caught.value)
    assert "; fetch it again" in str(caught.value)


def test_file_that_is_too_large_or_not_there_says_so(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        read_snapshot(tmp_path / "none")
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(MOST_SNAPSHOT_BYTES + 1)
    with pytest.raises(UsageError, match="more than 128 MiB"):
        read_snapshot(path)
