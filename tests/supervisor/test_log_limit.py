"""A log limit on its host: what a run prints never takes more room, and a reader is told what has gone."""

import errno
import json
import os
import tempfile
import unittest
from typing import Any, Dict, List, Tuple
from unittest import mock

from orchestrator.supervisor import cuts, records, wire
from orchestrator.supervisor.records import RecordWriter
from orchestrator.supervisor.seals import SealChecker
from orchestrator.supervisor.tail import Tail
from tests.supervisor.host import HostCase, Talk, of_kind

MIB = 1024 * 1024
PRINTED_MIB = 80
BEGIN = {"segment": 0, "offset": 0}
CODE = """
import os
line = b"x" * 79 + b"\\n"
for _ in range(%d):
    os.write(1, line * (1024 * 1024 // len(line)))
"""


class LimitTest(HostCase):
    def room(self, run_id: str) -> int:
        """Returns the bytes on the disk; files come and go meanwhile."""
        used = 0
        for name in os.listdir(self.path(run_id, "records")):
            try:
                used += os.stat(self.path(run_id, "records", name)).st_blocks * 512
            except FileNotFoundError:
                pass
        return used

    def watched(self, talk: Talk, run_id: str) -> Tuple[List[Any], int]:
        """Reads a conversation to its end; returns its frames and the most room that was taken meanwhile."""
        frames: List[Any] = []
        most = 0
        while True:
            header, body = talk.frame()
            most = max(most, self.room(run_id))
            if header.get("end"):
                return frames, most
            if "segment" in header:
                frames.append((header, body))

    def test_a_run_that_prints_five_times_its_limit_stays_below_it(self) -> None:
        limit = 16 * MIB
        job, entries, objects = self.job(CODE % PRINTED_MIB, log_limit_bytes=limit)
        frames, most = self.watched(self.start_job(job, entries, objects), job["run_id"])
        self.assertLessEqual(most, limit + records.RESERVE_BYTES)
        kept = os.listdir(self.path(job["run_id"], "records"))
        self.assertLessEqual(self.room(job["run_id"]), limit)
        self.assertGreater(self.room(job["run_id"]), limit // 2)
        self.assertEqual(len([name for name in kept if name.endswith(".cut")]), 1)
        self.assertEqual([name for name in kept if name.endswith(".new")], [])

        late = self.talk({"op": "read", "run": job["run_id"], "cursor": BEGIN, "follow": False})
        frames, _ = self.watched(late, job["run_id"])
        found = self.checked(job["run_id"], frames)
        told = of_kind(found, "cut")
        self.assertEqual([record["segment"] for record in told], sorted(record["segment"] for record in told))
        (cut,) = [header for header, _ in frames if "through" in header]
        self.assertEqual((cut["segment"], cut["offset"], cut["through"]), (1, 0, told[-1]["segment"]))
        self.assertEqual(found[-2]["kind"], "end")
        self.assertEqual(of_kind(found, "end")[0]["outcome"], "exited")
        last = of_kind(found, "out")[-1]
        self.assertEqual(last["off"] + len(last["text"]), PRINTED_MIB * (MIB // 80 * 80))

    def checked(self, run_id: str, frames: List[Any]) -> List[Dict[str, Any]]:
        """Checks every seal, over what has gone too, and returns the records."""
        checker, found = SealChecker(run_id), []
        for header, body in frames:
            if "through" in header:
                checker = SealChecker(run_id, resume=True)
                checker.feed(body)
            else:
                self.assertIsNotNone(checker.feed(body))
                found.append(body)
        self.assertEqual(checker.pending_bytes, len(b"".join(found).splitlines(True)[-1]))
        return [json.loads(line) for line in b"".join(found).splitlines()]

    def test_a_run_without_a_limit_keeps_everything(self) -> None:
        job, entries, objects = self.job(CODE % 20)
        frames, _ = self.watched(self.start_job(job, entries, objects), job["run_id"])
        found = self.checked(job["run_id"], frames)
        self.assertEqual(sum(len(record["text"]) for record in of_kind(found, "out")), 20 * (MIB // 80 * 80))

    def test_the_hashes_of_a_run_come_with_its_stub(self) -> None:
        job, entries, objects = self.job(CODE % 20, log_limit_bytes=16 * MIB)
        self.watched(self.start_job(job, entries, objects), job["run_id"])
        request = {
            "op": "digests",
            "run": job["run_id"],
            "sizes": [],
            "bundle": job["bundle"],
            "entries": None,
        }
        talk = self.talk(request)
        told: List[Dict[str, Any]] = [talk.header()]
        while not told[-1].get("end"):
            told.append(talk.header())
        with open(self.path(job["run_id"], "records", cuts.stub_name(told[-1]["cut"]["segment"]))) as file:
            self.assertEqual(told[-1]["cut"]["line"], file.read())
        self.assertEqual([part["segment"] for part in told[1:-1]][:1], [told[-1]["cut"]["segment"] + 1])


class RoomTest(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def size(self) -> int:
        names = [name for name in os.listdir(self.folder) if name != "reserve"]
        return sum(os.stat(os.path.join(self.folder, name)).st_size for name in names)

    def test_records_longer_than_a_segment_take_one_of_them_more_at_most(self) -> None:
        limit, longest = 16 * MIB, 6 * MIB + 1000
        writer = RecordWriter(self.folder, "run1", {}, limit_bytes=limit)
        for i in range(12):
            writer.write_output("main", 7, "stdout", i, i, "text", "\1" * MIB)  # six bytes each in JSON
            self.assertLessEqual(self.size(), limit + longest)
        writer.close()
        self.assertIn("000000.jsonl", os.listdir(self.folder))

    def test_a_stub_that_the_disk_does_not_take_is_tried_again_and_told_of_once(self) -> None:
        limit = 8000 + cuts.SLACK_BYTES
        writer = RecordWriter(self.folder, "run1", {}, segment_bytes=2000, limit_bytes=limit)
        told: List[int] = []
        tries: List[str] = []
        put, write_stub = writer._put, cuts._write_stub

        def noted(kind: str, body: bytes) -> None:
            if kind == "cut":
                told.append(json.loads(b"{" + body[1:])["segment"])
            put(kind, body)

        def full_at_first(path: str, line: bytes) -> None:
            tries.append(path)
            if len(tries) < 3:
                raise OSError(errno.ENOSPC, "full")
            write_stub(path, line)

        with mock.patch.object(writer, "_put", noted), mock.patch.object(cuts, "_write_stub", full_at_first):
            for i in range(200):
                writer.write("event", event={"step": i})
        writer.close()
        self.assertEqual(list(range(1, told[-1] + 1)), told)
        self.assertNotIn(cuts.segment_name(told[-1]), os.listdir(self.folder))

    def test_a_segment_is_an_eighth_of_the_limit_and_never_tiny_or_huge(self) -> None:
        for limit, expected in ((None, 64), (16 * MIB, 2), (2 * MIB, 1), (2**40, 64)):
            self.assertEqual(cuts.longest_segment(limit), expected * MIB)

    def test_a_reader_that_waits_for_the_first_segment_goes_on_behind_the_hole(self) -> None:
        writer = RecordWriter(
            self.folder, "run1", {}, segment_bytes=2000, limit_bytes=8000 + cuts.SLACK_BYTES
        )
        sent: List[Tuple[int, ...]] = []
        tail = Tail(
            self.folder, 0, 0,
            lambda segment, offset, _: sent.append((segment, offset)),
            lambda segment, offset, through, _: sent.append((segment, offset, through)),
        )  # fmt: skip
        tail.pump()
        for i in range(200):
            writer.write_output("main", 7, "stdout", i, i, "text", "x" * 100)
        tail.pump()
        (cut,) = [place for place in sent if len(place) == 3]
        self.assertEqual(cut[:2], (1, 0))
        after = sent[sent.index(cut) + 1 :]
        self.assertEqual(after[0], (cut[2] + 1, 0))
        tail.pump()
        self.assertEqual(len(after), len(sent) - sent.index(cut) - 1)

    def test_a_stub_that_is_replaced_while_it_is_looked_for_is_found_again(self) -> None:
        for index in (3, 7):
            with open(os.path.join(self.folder, cuts.stub_name(index)), "wb") as file:
                file.write(b"%d" % index)
        self.assertEqual(cuts.stub_for(self.folder, 4), (7, b"7"))
        self.assertEqual(cuts.stub_for(self.folder, 1), (3, b"3"))
        self.assertIsNone(cuts.stub_for(self.folder, 8))
        self.assertIsNone(cuts.stub_for(os.path.join(self.folder, "none"), 0))
        self.assertGreater(wire.MAX_BODY_BYTES, cuts.MOST_STUB_BYTES)


if __name__ == "__main__":
    unittest.main()
