"""What programs print when memory is out: every spelling that was found, read back as numbers."""

from __future__ import annotations

import textwrap
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from orchestrator.forensics import messages
from orchestrator.forensics.messages import OomMessage, find, find_in, parse
from orchestrator.text import printable

KIB, MIB, GIB = 2**10, 2**20, 2**30

_FILE = Path(__file__).with_name("oom_messages.txt")
TEXTS = {
    part.partition("\n")[0]: part.partition("\n")[2].strip("\n")
    for part in ("\n" + _FILE.read_text("utf-8")).split("\n== ")[1:]
}
"""Texts as they were found in trackers, in torch's sources and in logs, by the versions that print them."""

TORCH_2_9 = TEXTS["2.9 to 2.13"]

DEVICE_ALLOCATOR: dict[str, dict[str, Any]] = {
    "0.4 to 1.4": {
        "asked_bytes": MIB,
        "capacity_bytes": round(11.17 * GIB),
        "allocated_bytes": round(10.9 * GIB),
        "free_bytes": 576 * KIB,
        "reserved_unallocated_bytes": round(30.96 * MIB),
        "device": 0,
    },
    "1.5 to 2.0": {
        "asked_bytes": 192 * MIB,
        "free_bytes": 0,
        "allocated_bytes": round(3.08 * GIB),
        "reserved_unallocated_bytes": round(3.47 * GIB) - round(3.08 * GIB),
        "reserved_bytes": round(3.47 * GIB),
        "device": 3,
    },
    "2.0, a fraction set": {"allowed_bytes": round(4.77 * GIB), "reserved_bytes": round(4.74 * GIB)},
    "2.1, capacty": {
        "capacity_bytes": round(39.39 * GIB),
        "others": ((1618370, round(39.04 * GIB)),),
        "own_bytes": None,
        "reserved_unallocated_bytes": round(1.05 * GIB),
    },
    "2.1, a process whose use the driver does not know": {
        "asked_bytes": 20 * MIB,
        "own_bytes": None,
        "allocated_bytes": round(14.51 * GIB),
    },
    "2.5 to 2.8": {"asked_bytes": round(1.95 * GIB), "own_bytes": 966 * MIB},
    "2.9 to 2.13": {
        "asked_bytes": round(1.95 * GIB),
        "asked_text": "1.95 GiB",
        "capacity_bytes": round(14.57 * GIB),
        "free_bytes": round(1.58 * GIB),
        "others": ((2493055, round(12.02 * GIB)),),
        "own_bytes": 966 * MIB,
        "allocated_bytes": round(734.07 * MIB),
        "reserved_unallocated_bytes": round(33.93 * MIB),
        "device": 0,
        "line": 1,
    },
    "2.4 and later: CUDA graphs, a fraction, several processes in any order": {
        "others": ((7, round(1.25 * 2**40)), (12, 512)),
        "own_bytes": round(73.1 * GIB),
        "allowed_bytes": 90 * GIB,
        "private_pools_bytes": round(3.5 * GIB),
        "allocated_bytes": 70 * GIB,
        "device": 5,
    },
    "2.4 and later, ROCm": {"asked_bytes": round(4.7 * GIB), "capacity_bytes": round(63.98 * GIB)},
    "cudaMallocAsync, no limit": {
        "asked_bytes": round(686.41 * MIB),
        "allocated_bytes": round(54.14 * GIB),
        "capacity_bytes": round(79.35 * GIB),
        "free_bytes": round(27.19 * MIB),
        "allowed_bytes": None,
        "device": 5,
        "detail": "cudaMallocAsync",
    },
    "cudaMallocAsync, a fraction set": {"allowed_bytes": 10 * GIB, "capacity_bytes": round(11.59 * GIB)},
    "2.12 and later, refused before the driver is asked: only two words of it are known": {
        "asked_bytes": 2 * GIB,
        "detail": "preemptively rejected",
    },
    "2.12 and later, the same in another order": {
        "asked_bytes": 2 * GIB,
        "allowed_bytes": 10 * GIB,
        "device": 1,
        "detail": "preemptively rejected",
    },
    "any, cut off": {"asked_bytes": None},
    "any, too large": {"asked_bytes": None},
}


@pytest.mark.parametrize("version", DEVICE_ALLOCATOR)
def test_every_version_of_the_message_is_read(version: str) -> None:
    expected = DEVICE_ALLOCATOR[version]
    found = find(f"line before\n{TEXTS[version]}\nline after\n")
    assert found.count == 1, found
    message = found.last
    assert message is not None
    assert message.kind == "device allocator"
    read = {name: getattr(message, name) for name in expected}
    assert read == expected | ({"line": 2} if "line" in expected else {})


OTHER_KINDS = [name for name in TEXTS if name not in DEVICE_ALLOCATOR]


@pytest.mark.parametrize("name", OTHER_KINDS)
def test_what_else_is_called_out_of_memory_is_told_apart(name: str) -> None:
    found = find(f"epoch 1\n{TEXTS[name]}\n")
    kind, detail, _ = name.split(" | ")
    assert [(message.kind, str(message.detail)) for message in found.messages] == [(kind, detail)]


def test_numbers_of_other_kinds_are_read_where_they_are_told() -> None:
    messages = [parse(TEXTS[name]) for name in OTHER_KINDS]
    asked = [message.asked_bytes for message in messages if message and message.asked_bytes]
    assert asked == [2359296, 2359296, 2359296, 131072]


@pytest.mark.parametrize(
    "text",
    [
        "step 12 allocated 3.00 GiB, 0 out of 8 done, out of disk space",
        "    except MemoryError:\n        raise",
        "job was Killed by the operator",
        "torch.cuda.OutOfMemoryError is caught here",
        "usage: see [Errno 12] or std::bad_alloc in the FAQ",
        'if "CUDA out of memory" in str(e): retry()',
        "CUDA out of memory. Trying a smaller batch",
        "",
    ],
)
def test_what_is_no_lack_of_memory_is_none(text: str) -> None:
    assert parse(text) is None


class TestHowPeoplePasteIt:
    expected = find(TORCH_2_9).last

    @pytest.mark.parametrize(
        ("what", "text"),
        [
            ("broken at every word", TORCH_2_9.replace(" ", "\n")),
            ("broken at words", textwrap.fill(TORCH_2_9, 28)),
            ("broken anywhere", "\n".join(TORCH_2_9[i : i + 47] for i in range(0, len(TORCH_2_9), 47))),
            ("a rank's prefix on each line", "[rank0]: " + TORCH_2_9.replace(". ", ".\n[rank0]: ")),
            (
                "a rank's prefix on each line, broken anywhere",
                "\n".join(f"[rank0]: {line}" for line in textwrap.wrap(TORCH_2_9, 37)),
            ),
            (
                "as orch logs shows it",
                "pve-200 0123abcd/rank0.stderr:121 | " + TORCH_2_9.replace("14.57 GiB", "14.57 \n    GiB"),
            ),
            (
                "as orch logs --long shows it",
                "h 0123abcd/main.stderr:9 pid 12 2026-11-30T08:00:00.000Z | "
                + TORCH_2_9.replace(
                    "Process", "\nh 0123abcd/main.stderr:10 pid 12 2026-11-30T08:00:00.000Z | Process"
                ),
            ),
            (
                "time stamps",
                "2026-11-30 08:00:00,123 " + TORCH_2_9.replace(". ", ".\n2026-11-30 08:00:01,5 "),
            ),
            ("colours", TORCH_2_9.replace("GiB", "\x1b[1mGiB\x1b[0m").replace("CUDA", "\x1b[31mCUDA")),
            ("colours as orch shows them", printable("\x1b[31m" + TORCH_2_9.replace("GPU", "\x1b[1mGPU"))),
            ("JSON", TORCH_2_9.replace(". ", ".\\n")),
            ("ray", "(train pid=12, ip=10.0.0.1) " + TORCH_2_9.replace(". ", ".\n(train pid=12) ")),
        ],
        ids=lambda value: value if len(value) < 40 else "",
    )
    def test_the_numbers_are_the_same(self, what: str, text: str) -> None:
        message = parse(text)
        assert message is not None
        assert self.expected is not None
        assert _numbers(message) == _numbers(self.expected), what


def test_the_first_and_the_last_of_several_messages_are_kept() -> None:
    texts = [TORCH_2_9.replace("1.95 GiB", f"{number}.00 GiB") for number in range(1, 31)]
    found = find("\n".join(texts))
    assert found.count == 30
    assert found.first is not None
    assert found.last is not None
    assert (found.first.asked_text, found.first.line) == ("1.00 GiB", 1)
    assert (found.last.asked_text, found.last.line) == ("30.00 GiB", 30)
    assert len(found.messages) == 8


def test_a_message_keeps_its_own_numbers_when_another_one_follows() -> None:
    short = "RuntimeError: CUDA out of memory. Tried to allocate 3.00 GiB."
    found = find(f"{short}\n{TORCH_2_9}")
    assert [message.asked_text for message in found.messages] == ["3.00 GiB", "1.95 GiB"]
    assert found.messages[0].capacity_bytes is None


def test_a_message_close_before_another_one_is_not_passed_over() -> None:
    shm = TEXTS["container limit | /dev/shm | 17"]
    found = find(f"{shm}\n{TEXTS['2.4 and later, ROCm']}\n")
    assert [message.kind for message in found.messages] == ["container limit", "device allocator"]


def test_pieces_of_any_length_give_what_the_whole_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "x\n" * 500 + "\n".join(TEXTS.values()) + "\n" * 3000 + TORCH_2_9
    whole = find(text)
    monkeypatch.setattr(messages, "_SEARCHED_CHARACTERS", 1)
    for length in (97, 1000):
        assert find_in(text[at : at + length] for at in range(0, len(text), length)) == whole
    assert whole.count == len(TEXTS) + 1


def test_what_was_tried_alone_counts_where_that_is_wanted_and_nothing_better_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bare = "loss 3\nTried to allocate 15.09 GiB\nsaid again: Tried to allocate 192.00 MiB, and so on\n"
    for searched in (1, messages._SEARCHED_CHARACTERS):
        monkeypatch.setattr(messages, "_SEARCHED_CHARACTERS", searched)
        found = find_in([bare[:17], bare[17:40], bare[40:]], takes_bare=True)
        assert found.count == 1
        assert found.last is not None
        assert (found.last.asked_text, found.last.line) == ("192.00 MiB", 3)
        better = find_in([bare, TORCH_2_9, bare], takes_bare=True)
        assert [message.asked_text for message in better.messages] == ["1.95 GiB"]
    assert find(bare).count == 0
    assert find_in(["Tried to allocate 3 apples, and tried to allocate 2 GiB"], takes_bare=True).count == 0


def test_a_failed_attempt_of_the_allocator_is_marked() -> None:
    message = parse(
        "[W812 16:00:28.6434 CUDACachingAllocator.cpp:3933] memory allocation failed with OOM on device 1 "
        "while trying to allocate 20971520 bytes (free: 15794176, total: 150111977472)."
    )
    assert message is not None
    assert message.asked_bytes == 20971520
    assert message.detail == "an attempt that failed before the cache was flushed"


FRAME = (
    '  File "/opt/torch/nn/modules/module.py", line 1776, in _wrapped_call_impl\n    return self.f(*args)\n'
)


def test_a_message_in_the_middle_of_a_long_traceback_is_found_in_bounded_time_and_memory() -> None:
    def lines() -> Any:
        for number in range(2_000):
            yield FRAME * 25  # 100,000 lines
            if number == 1_000:
                yield TORCH_2_9[:100]
                yield TORCH_2_9[100:] + "\n"

    began = time.process_time()
    tracemalloc.start()
    found = find_in(lines())
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found.count == 1
    assert found.last is not None
    assert found.last.asked_text == "1.95 GiB"
    assert found.last.line == 1_001 * 50 + 1
    assert most_bytes < 1_000_000
    assert time.process_time() - began < 10


@pytest.mark.parametrize(
    "text",
    [
        "step 100 loss 3.21 memory. lr 1e-4 memory\n" * 25_000,
        "Killed the previous request; tried again\n" * 25_000,
        "memory." * 100_000,
        "Killed\n" * 20_000,
        "[Errno 12] " * 50_000,
        "CUDA out of memory. " * 20_000,
        "".join(f"{TORCH_2_9.replace('1.95', str(number % 90))}\n" for number in range(5_000)),
    ],
    ids=["memory.", "Killed the", "one line", "Killed", "Errno", "CUDA", "messages"],
)
def test_text_that_is_full_of_its_words_takes_no_longer(text: str) -> None:
    began = time.process_time()
    find_in(text[at : at + 65_536] for at in range(0, len(text), 65_536))
    assert time.process_time() - began < 2.5


def test_many_words_that_look_like_it_take_no_longer() -> None:
    began = time.process_time()
    assert find("step Killed out of resource preemptively Unable to allocate\n" * 10_000).count == 0
    assert time.process_time() - began < 10


def _numbers(message: OomMessage) -> dict[str, Any]:
    return {
        name: getattr(message, name)
        for name in OomMessage.__dataclass_fields__
        if name not in ("text", "line")
    }
