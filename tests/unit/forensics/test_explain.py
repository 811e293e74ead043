"""From a message, a capture and what surrounds them to a cause, a tensor and a way out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from orchestrator.forensics.captures import read_capture
from orchestrator.forensics.causes import Surroundings
from orchestrator.forensics.explain import Explanation, Facts, asked_size, explain, failure_of
from orchestrator.forensics.growth import Series, steady_growth
from orchestrator.forensics.messages import find
from orchestrator.forensics.naming import name_tensor
from orchestrator.forensics.outlook import Outlook, Remedy
from orchestrator.forensics.shapes import ShapeSet, read_shape_set

GIB = 2**30


def message(
    asked: str,
    free: str,
    *,
    allocated: str = "70.00 GiB",
    unused: str = "1.00 GiB",
    middle: str | None = None,
) -> str:
    """Of a process that has the card alone, unless ``middle`` says something else."""
    own = 94.97 - float(free.partition(" ")[0])
    alone = f"Including non-PyTorch memory, this process has {own:.2f} GiB memory in use. "
    return (
        f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {asked}. GPU 0 has a total capacity "
        f"of 94.97 GiB of which {free} is free. {alone if middle is None else middle}Of the allocated memory "
        f"{allocated} is allocated by PyTorch, and {unused} is reserved by PyTorch but unallocated. If"
    )


def explained(text: str, **facts: Any) -> Explanation:
    found = explain(Facts(found=find(text), **facts))
    assert found is not None
    return found


def scores(label: str, queries: int, *, applies: bool = True) -> ShapeSet:
    """A configuration that makes one score matrix [32, queries, queries] and little else."""
    dims = [
        {"name": "heads", "expression": "num_attention_heads", "value": 32},
        {"name": "queries", "expression": "anchors · block_size", "value": queries, "numbers": f"{queries}"},
        {"name": "keys", "expression": "anchors · block_size", "value": queries},
    ]
    tensor = {
        "name": "attention scores",
        "category": "scores",
        "dtype": "float32",
        "dims": dims,
        "bytes": 32 * queries * queries * 4,
        "applies": applies,
        "when": "attention is eager",
        "count": 1,
        "born": "dflash.attention.eager.attend",
        "remedy": {"attention": "flex"},
    }
    return read_shape_set({"tensors": [tensor]}, label=label, params={"anchors": queries // 16})


def named(text: str, own: ShapeSet, *others: ShapeSet, **facts: Any) -> Explanation:
    found = find(text)
    size = asked_size(*failure_of(Facts(found=found)))
    assert size is not None
    naming = name_tensor(size, own=own, others=others)
    return explained(text, naming=naming, **facts)


class TestEachClassOfCause:
    def test_an_allocation_that_is_too_large_says_what_was_left(self) -> None:
        found = explained(message("22.31 GiB", "10.00 GiB"))
        assert found.cause.name == "too large"
        assert found.answer.startswith(
            "out of memory: 22.31 GiB asked; too large for the 10.00 GiB that were left"
        )
        assert "12.31 GiB more than there was room for" in found.cause.evidence

    def test_unused_pieces_that_would_do_together_are_fragmentation(self) -> None:
        found = explained(message("2.00 GiB", "0.50 GiB", unused="6.50 GiB"))
        assert found.cause.name == "fragmentation"
        assert "6.50 GiB are reserved by torch and unused" in found.cause.evidence[0]
        assert "expandable_segments:True" in (found.cause.advice or "")

    def test_a_card_that_is_simply_full_is_not_called_fragmented(self) -> None:
        found = explained(message("20.00 MiB", "0.01 GiB", allocated="93.00 GiB", unused="1.30 GiB"))
        assert found.cause.name == "too large"
        assert "98% of the card is allocated by this process" in found.cause.evidence

    def test_expandable_segments_are_not_advised_where_they_are_on(self) -> None:
        around = Surroundings(settings={"expandable_segments": True})
        found = explained(message("2.00 GiB", "0.50 GiB", unused="6.50 GiB"), around=around)
        assert found.cause.name == "fragmentation"
        assert "expandable_segments:True" not in (found.cause.advice or "")

    def test_a_large_unused_piece_is_no_fragmentation(self) -> None:
        text = message("2.00 GiB", "0.50 GiB", unused="6.50 GiB")
        whole = capture(asked_bytes=2 * GIB, largest_free_bytes=3 * GIB)
        pieces = capture(asked_bytes=2 * GIB, largest_free_bytes=GIB)
        assert explained(text, captures=(whole,)).cause.name != "fragmentation"
        found = explained(text, captures=(pieces,))
        assert found.cause.name == "fragmentation"
        assert "the largest unused piece is 1.00 GiB" in found.cause.evidence

    def test_a_free_block_that_fits_and_is_not_given_is_no_piece_too_small(self) -> None:
        text = message("1.25 GiB", "0.40 GiB", allocated="60.00 GiB", unused="18.00 GiB")
        found = explained(text, captures=(capture(asked_bytes=5 * GIB // 4, largest_free_bytes=5 * GIB),))
        assert found.cause.name == "too large"
        assert any(
            "a free block of 5.00 GiB is not for this request" in line for line in found.cause.evidence
        )
        assert not any("in pieces" in line for line in found.cause.evidence)
        assert found.cause.advice is None

    @pytest.mark.parametrize(
        ("foreign", "unused", "name"),
        [
            ("63.00", "5.00", "taken by another process"),  # far more than what is unused
            ("16.00", "5.00", "fragmentation"),
            ("0.50", "2.00", "too large"),  # 2 % of the card
        ],
    )
    def test_pieces_come_after_who_holds_far_more(self, foreign: str, unused: str, name: str) -> None:
        allocated = 94.37 - float(foreign) - float(unused)
        middle = (
            f"Process 4711 has {foreign} GiB memory in use. Including non-PyTorch memory, this process has "
            f"{allocated + float(unused) + 0.5:.2f} GiB memory in use. "
        )
        held, kept = f"{allocated:.2f} GiB", f"{unused} GiB"
        text = message("1.00 GiB", "0.10 GiB", allocated=held, unused=kept, middle=middle)
        assert explained(text).cause.name == name

    def test_a_leak_far_above_what_is_unused_comes_before_pieces(self) -> None:
        series = Series(name="GPU 0 in use", values=tuple(step * 8 * GIB for step in range(1, 10)))
        growth = steady_growth(series)
        assert growth is not None
        for unused, name in (("4.50 GiB", "leak across iterations"), ("20.00 GiB", "fragmentation")):
            text = message("0.50 GiB", "0.10 GiB", allocated="72.00 GiB", unused=unused)
            assert explained(text, around=Surroundings(growths=(growth,))).cause.name == name

    def test_memory_that_another_process_holds_is_its_fault(self) -> None:
        middle = (
            "Process 4711 has 73.00 GiB memory in use. Including non-PyTorch memory, this process has 12.00 "
            "GiB memory in use. "
        )
        found = explained(
            message("15.09 GiB", "9.97 GiB", allocated="10.00 GiB", unused="1.00 GiB", middle=middle)
        )
        assert found.cause.name == "taken by another process"
        assert "process 4711 holds 73.00 GiB" in found.cause.evidence
        assert "process 4711: 73.00 GiB" in found.held

    def test_the_own_process_under_a_foreign_number_is_no_other(self) -> None:
        middle = "Process 4711 has 71.60 GiB memory in use. "  # as the driver counts, outside the container
        found = explained(message("25.00 GiB", "23.37 GiB", middle=middle))
        assert found.cause.name == "too large"
        assert found.balance.others == ()
        assert "this process beside torch's allocator: 0.60 GiB" in found.held

    def test_what_nobody_is_seen_to_hold_is_told(self) -> None:
        middle = "Including non-PyTorch memory, this process has 12.00 GiB memory in use. "
        found = explained(
            message("15.00 GiB", "2.97 GiB", allocated="10.00 GiB", unused="1.00 GiB", middle=middle)
        )
        assert found.cause.name == "taken by another process"
        assert "80.00 GiB are held by processes that this one cannot see" in found.cause.evidence

    def test_an_old_message_without_processes_says_what_is_not_torch_s(self) -> None:
        text = (
            "RuntimeError: CUDA out of memory. Tried to allocate 22.31 GiB (GPU 0; 94.97 GiB total capacity; "
            "10.00 GiB already allocated; 9.97 GiB free; 11.00 GiB reserved in total by PyTorch)"
        )
        found = explained(text)
        assert found.cause.name == "taken by another process"
        assert found.cause.evidence == (
            "72.00 GiB are not torch's: other processes hold them, or libraries of this one",
        )

    def test_a_memory_limit_is_told_from_a_full_card(self) -> None:
        text = message("22.31 GiB", "60.00 GiB", allocated="20.00 GiB", middle="30.00 GiB allowed; ")
        ours = explained(text, around=Surroundings(is_limited=True), allocator_bytes=30 * GIB)
        assert ours.cause.name == "memory limit"
        assert "the run's memory limit" in ours.answer
        theirs = explained(text)
        assert "set_per_process_memory_fraction" in (theirs.cause.advice or "")

    def test_what_a_full_card_calls_free_is_no_limit(self) -> None:
        # As an H200 said it when torch held all of it.
        middle = "Including non-PyTorch memory, this process has 94.96 GiB memory in use. "
        text = message("2.00 MiB", "3.12 MiB", allocated="94.45 GiB", unused="0 bytes", middle=middle)
        cause = explained(text).cause
        assert cause.name == "too large"
        assert cause.sentence == "the card is full: torch holds 94.45 GiB of 94.97 GiB"
        assert cause.evidence == (
            "2.0 MiB more than there was room for",
            "the 3.1 MiB that are called free are the driver's reserve",
            "99% of the card is allocated by this process",
        )
        assert cause.advice is None
        roomy = message("2.00 MiB", "312.00 MiB", allocated="94.15 GiB", unused="0 bytes", middle=middle)
        assert explained(roomy).cause.name == "memory limit"

    def test_a_limit_as_large_as_the_card_is_none(self) -> None:
        whole = capture(asked_bytes=22 * GIB, limit_bytes=round(94.97 * GIB))
        found = explained(message("22.00 GiB", "10.00 GiB"), captures=(whole,))
        assert found.balance.limit_bytes is None
        part = capture(asked_bytes=22 * GIB, limit_bytes=80 * GIB)
        found = explained(message("22.00 GiB", "10.00 GiB"), captures=(part,))
        assert "torch may take 80.00 GiB of it" in found.asked

    def test_memory_that_grows_to_its_end_is_a_leak(self) -> None:
        growth = steady_growth(Series(name="GPU 0 in use", values=tuple(n * 4 * GIB for n in range(10, 24))))
        assert growth is not None
        found = explained(message("2.00 GiB", "1.00 GiB"), around=Surroundings(growths=(growth,)))
        assert found.cause.name == "leak across iterations"
        assert "by 4.00 GiB each time" in found.answer
        limited = message("2.00 GiB", "40.00 GiB", middle="71.50 GiB allowed; ")
        found = explained(limited, around=Surroundings(growths=(growth,), is_limited=True))
        assert found.cause.name == "leak across iterations", "the limit is only where it ended"
        assert "GPU 0 in use went from 40.00 GiB to 92.00 GiB in 13 steps" in found.cause.evidence

    @pytest.mark.parametrize(
        ("text", "name", "words"),
        [
            ("NCCL WARN Cuda failure 2 'out of memory'", "outside the allocator", "NCCL got no memory"),
            ("CUBLAS_STATUS_ALLOC_FAILED when calling", "outside the allocator", "cuBLAS got no memory"),
            ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 3221225472 bytes.",
             "host memory", "not the card's: 3.00 GiB were asked for"),
            ("insufficient shared memory (shm)", "container limit", "/dev/shm"),
            ("unable to open shared memory object </torch_1> in read-write mode: Too many open files (24)",
             "container limit", "too many files open"),
            ("Memory cgroup out of memory: Killed process 7", "container limit", "container's memory limit"),
            ("out of resource: shared memory, Required: 131072, Hardware limit: 101376.",
             "shared memory of a kernel", "no lack of memory"),
        ],
    )  # fmt: skip
    def test_what_is_not_torch_s_allocator(self, text: str, name: str, words: str) -> None:
        found = explained(f"x: {text}\n")
        assert found.cause.name == name
        assert words in found.answer

    @pytest.mark.parametrize(("where", "name"), [("cgroup", "container limit"), ("host", "host memory")])
    def test_a_killed_run_without_any_message_has_its_cause_from_the_kernel(
        self, where: str, name: str
    ) -> None:
        found = explain(Facts(around=Surroundings(killed_in=where, peak_rss_bytes=30 * GIB)))
        assert found is not None
        assert found.cause.name == name
        assert "the run's largest process had 30.00 GiB of the host's memory" in found.cause.evidence

    def test_nothing_that_is_known_says_nothing(self) -> None:
        assert explain(Facts(found=find("all went well"))) is None


class TestWhichMessageCounts:
    def test_what_ended_the_run_goes_before_what_was_printed_last(self) -> None:
        ended_by = find(message("3.00 GiB", "1.00 GiB")).last
        found = explained(f"{message('5.00 GiB', '1.00 GiB')}\nOSError: [Errno 12]\n", ended_by=ended_by)
        assert found.message == ended_by

    def test_a_first_message_of_another_size_is_told(self) -> None:
        found = explained("\n".join([message("9.00 GiB", "1.00 GiB"), message("3.00 GiB", "1.00 GiB")]))
        assert found.message is not None
        assert found.message.asked_text == "3.00 GiB"
        assert any(
            "the first of 2 messages (line 1) is another one: 9.00 GiB asked" in n for n in found.notes
        )

    def test_a_failed_attempt_does_not_stand_for_the_failure(self) -> None:
        attempt = "memory allocation failed with OOM on device 1 while trying to allocate 20971520 bytes"
        found = explained(f"{message('3.00 GiB', '1.00 GiB')}\n{attempt}\n")
        assert found.message is not None
        assert found.message.asked_text == "3.00 GiB"


class TestTheTensor:
    def test_it_is_named_in_the_first_line_with_its_shape_and_expression(self) -> None:
        found = named(message("8.00 GiB", "1.00 GiB"), scores("run 1", 8192))
        assert found.answer.startswith("out of memory: attention scores, [32, 8192, 8192] float32, 8.00 GiB")
        assert any("queries 8192 = anchors · block_size" in line for line in found.tensor)
        assert "  made in dflash.attention.eager.attend" in found.tensor

    def test_a_size_of_another_run_s_configuration_says_so_first(self) -> None:
        own, other = scores("run 1", 2048), scores("run 0", 8192)
        found = named(message("8.00 GiB", "1.00 GiB"), own, other)
        assert found.answer.startswith("this log may not be this configuration's: 8.00 GiB is ")
        assert "of run 0" in found.answer
        assert not found.remedies, "what would help another configuration is no remedy for this one"

    def test_what_nothing_fits_is_not_named(self) -> None:
        found = named(message("7.77 GiB", "1.00 GiB"), scores("run 1", 8192))
        nothing = "7.77 GiB asked, the size of nothing that these parameters make; too large"
        assert found.answer.startswith(f"out of memory: {nothing}")
        assert found.tensor[0] == "7.77 GiB is the size of no tensor that the payload declares"

    @pytest.mark.parametrize(
        ("asked", "small"), [("2.00 MiB", "anything up to 1 MiB"), ("20.00 MiB", "anything from 1 to 10 MiB")]
    )
    def test_a_size_that_torch_asks_for_whatever_is_small_tells_nothing(self, asked: str, small: str) -> None:
        found = named(message(asked, "0.00 GiB"), scores("run 1", 8192))
        assert found.answer.startswith(f"out of memory: {asked} asked, for {small}; ")
        says = f"{asked} is what torch asks for at once for {small}: it was something small"
        assert found.tensor[0].startswith(says)
        assert len(found.tensor) == 1, "what is nearest in size says nothing either"

    def test_what_is_to_be_said_first_is(self) -> None:
        found = explained(message("7.77 GiB", "1.00 GiB"), caution="these are another's")
        assert found.answer.startswith("these are another's; out of memory: 7.77 GiB asked; ")

    def test_without_shapes_the_missing_program_is_named(self) -> None:
        why = "the payload ships no dflash/shapes.py, which would name the tensor"
        found = explained(message("7.77 GiB", "1.00 GiB"), unnamed_why=why)
        assert found.tensor == (why,)

    def test_a_capture_gives_the_exact_size_and_the_place(self) -> None:
        exact = capture(
            asked_bytes=8 * GIB + 2**21,
            requested_bytes=8 * GIB,
            stack=["eager.py:40 attend", "layers.py:9 forward"],
            module="layers.3.attn",
        )
        text = message("8.00 GiB", "1.00 GiB")
        size = asked_size(*failure_of(Facts(found=find(text), captures=(exact,))))
        assert size is not None
        assert (size.least_bytes, size.most_bytes) == (8 * GIB, 8 * GIB)
        found = explained(text, captures=(exact,))
        assert "8.00 GiB asked in layers.3.attn at eager.py:40 attend" in found.answer
        assert {"module layers.3.attn", "at eager.py:40 attend", "at layers.py:9 forward"} <= set(found.asked)

    @pytest.mark.parametrize(
        "asked", ["0 bytes", "1 bytes", "512 bytes", "9000000.99 TiB", "999999999999999999.99 TiB"]
    )
    def test_a_size_that_no_tensor_has_is_not_named(self, asked: str) -> None:
        found = find(message(asked, "1.00 GiB"))
        size = asked_size(*failure_of(Facts(found=found)))
        naming = None if size is None else name_tensor(size, own=scores("run 1", 8192))
        told = explain(Facts(found=found, naming=naming))
        assert told is not None
        assert "out of memory: " in told.answer
        assert naming is None or (naming.candidates, naming.unknown) == ((), 1.0)

    @pytest.mark.parametrize("asked", [0, 1, 2**62])
    def test_a_captured_size_that_no_tensor_has_is_not_named(self, asked: int) -> None:
        facts = Facts(captures=(capture(asked_bytes=asked, free_bytes=0),))
        size = asked_size(*failure_of(facts))
        assert size is None or name_tensor(size, own=scores("run 1", 8192)).candidates == ()
        found = explain(facts)
        assert found is not None
        assert (found.balance.asked_bytes is None) == (asked != 1)

    def test_small_sizes_are_told_in_their_own_unit(self) -> None:
        event = capture(asked_bytes=90 * 2**20, free_bytes=70 * 2**20, reserved_bytes=0)
        found = explain(Facts(captures=(event,)))
        assert found is not None
        assert found.answer.startswith("out of memory: 90.0 MiB asked; too large for the 70.0 MiB that were")

    def test_a_capture_of_another_failure_is_not_mixed_with_it(self) -> None:
        other, own = capture(asked_bytes=3 * GIB, module="a"), capture(asked_bytes=8 * GIB, module="b")
        found = explained(message("8.00 GiB", "1.00 GiB"), captures=(own, other))
        assert found.capture == own
        assert explained(message("8.00 GiB", "1.00 GiB"), captures=(other,)).capture is None


class TestWhoHeldTheRest:
    def test_owners_and_the_largest_blocks_are_listed_the_largest_first(self) -> None:
        found = explained(
            message("8.00 GiB", "1.00 GiB"),
            captures=(
                capture(
                    asked_bytes=8 * GIB,
                    owners=[
                        {"category": "parameter", "bytes": 3 * GIB, "blocks": 58},
                        {"category": "activation", "bytes": 40 * GIB, "blocks": 120},
                    ],
                    modules=[{"module": "layers.*", "bytes": 38 * GIB}],
                    largest=[
                        {
                            "bytes": 2 * GIB,
                            "category": "parameter",
                            "name": "lm_head.weight",
                            "shape": [248320, 5120],
                            "dtype": "bfloat16",
                            "module": None,
                            "where": None,
                        }
                    ],
                ),
            ),
        )
        held = [line.strip() for line in found.held]
        assert held.index("activation: 40.00 GiB in 120 blocks") < held.index(
            "parameter: 3.00 GiB in 58 blocks"
        )
        assert "made in module layers.*: 38.00 GiB" in held
        assert "2.00 GiB: lm_head.weight [248320, 5120] bfloat16" in held

    def test_a_hostile_event_is_believed_only_as_far_as_its_types(self) -> None:
        odd = read_capture(
            {
                "asked_bytes": -1,
                "free_bytes": "many",
                "reserved_bytes": 2**80,
                "allocated_bytes": True,
                "stack": "no list",
                "owners": [{"bytes": "x"}, 3, None],
                "largest": [{"shape": ["a"], "bytes": 5}],
                "module": "a\x1b[31m\n",
                "processes": {"pid": 1},
            },
            proc="main",
        )
        assert odd.asked_bytes is odd.free_bytes is odd.reserved_bytes is odd.allocated_bytes is None
        assert odd.stack == ()
        assert odd.largest[0].shape is None
        assert odd.module == "a\\x1b[31m\\n"
        assert explain(Facts(captures=(odd,))) is not None


class TestWhatWouldFit:
    def outlook(self, *verdicts: str) -> Outlook:
        remedies = tuple(
            Remedy(
                label=f"way {number}",
                changes={"recompute": str(number)},
                alloc_conf=None,
                peak_allocated_bytes=(100 - 30 * number) * GIB,
                peak_reserved_bytes=(100 - 30 * number) * GIB,
                verdict=verdict,
            )
            for number, verdict in enumerate(verdicts)
        )
        return Outlook(verdict="does not fit", error_share=0.01, remedies=remedies)

    def test_what_fits_comes_first_in_the_order_of_its_cost(self) -> None:
        found = explained(
            message("22.31 GiB", "10.00 GiB"), outlook=self.outlook("does not fit", "fits", "fits")
        )
        assert [remedy.label for remedy in found.remedies] == ["way 1", "way 2", "way 0"]

    def test_without_a_card_the_room_that_the_message_tells_of_decides(self) -> None:
        found = explained(message("22.31 GiB", "10.00 GiB"), outlook=self.outlook("no card", "no card"))
        assert [(r.label, r.verdict) for r in found.remedies] == [
            ("way 1", "fits"),
            ("way 0", "does not fit"),
        ]

    def test_the_tensor_s_own_remedy_is_offered_without_a_prediction(self) -> None:
        found = named(message("8.00 GiB", "1.00 GiB"), scores("run 1", 8192))
        assert [(r.label, r.verdict) for r in found.remedies] == [("attention=flex", None)]


class TestWhatWasForeseen:
    def outlook(self, peak_gib: int) -> Outlook:
        peak = peak_gib * GIB
        return Outlook(
            peak_allocated_bytes=peak, peak_reserved_bytes=peak, error_share=0.05, verdict="does not fit"
        )

    def test_a_prediction_that_agrees_stands_by_itself(self) -> None:
        found = explained(message("22.00 GiB", "10.00 GiB"), outlook=self.outlook(90))
        assert found.foreseen == ("as it is: 90.00 GiB allocated, 90.00 GiB reserved at most: does not fit",)

    def test_without_a_card_the_message_s_own_room_judges_it(self) -> None:
        for peak_gib, verdict in ((120, "does not fit"), (40, "fits")):
            outlook = replace(self.outlook(peak_gib), verdict="no card")
            (line, *_) = explained(message("22.00 GiB", "10.00 GiB"), outlook=outlook).foreseen
            assert line.endswith(f"reserved at most: {verdict}")

    def test_much_more_than_was_predicted_is_another_s_or_unknown(self) -> None:
        found = explained(message("22.00 GiB", "10.00 GiB"), outlook=self.outlook(32))
        assert found.foreseen[1].startswith(
            "but 92.00 GiB were allocated and asked for: another configuration"
        )

    def test_why_nothing_is_predicted_is_told(self) -> None:
        found = explained(message("8.00 GiB", "1.00 GiB"), outlook=Outlook(missing="no torch here"))
        assert found.foreseen == ("nothing is predicted: no torch here",)


class TestGrowth:
    @pytest.mark.parametrize(
        ("values", "grows"),
        [
            ((10, 20, 30, 40, 50, 60, 70, 80), True),
            ((10, 10, 12, 12, 14, 14, 16, 17, 18, 18, 20), True),
            ((10, 40, 70, 71, 71, 71, 71, 71, 71, 71), False),  # it warms up
            ((10, 20, 30, 20, 30, 20, 30, 20, 30), False),  # each step gives back what it took
            ((10, 20, 30), False),  # too short
            ((100, 101, 102, 103, 104, 105, 106, 107), False),  # next to nothing
            ((80, 70, 60, 50, 40, 30, 20), False),
            ((10, 14, 18, 24, 34, 51, 76, 118), False),  # batches that are tried, each 1.6 times the last
            (tuple(step * step for step in range(4, 20)), False),  # scores of rows that become longer
            ((8, 8, 8, 8, 16, 16, 16, 16, 32, 32, 32, 32, 64, 64, 64, 64), False),  # a curriculum's stages
            ((10, 13, 15, 19, 21, 23, 27, 30, 32, 35, 39, 41), True),  # about as much each time
        ],
    )
    def test_only_what_rises_to_the_end_is_growth(self, values: tuple[int, ...], grows: bool) -> None:
        found = steady_growth(Series(name="x", values=tuple(value * GIB for value in values)))
        assert (found is not None) == grows

    @pytest.mark.parametrize(
        ("rise_mib", "stride", "grows"), [(4, 1, False), (32, 1, True), (32, 2**28, False)]
    )
    def test_a_growth_of_next_to_nothing_is_none(self, rise_mib: int, stride: int, grows: bool) -> None:
        values = tuple(step * rise_mib * 2**20 for step in range(8))
        assert (steady_growth(Series(name="x", values=values, stride=stride)) is not None) == grows


def capture(**event: Any) -> Any:
    return read_capture(event, proc="main")
