"""The record stream by itself: numbering, segments, seals, a full disk, how output is cut up, frames."""

import base64
import glob
import json
import os
import random
import subprocess
import tempfile
import unittest
from typing import Any, Dict, List

from orchestrator.supervisor import wire
from orchestrator.supervisor.pump import CHUNK_BYTES, Pump, pieces, unfinished_tail
from orchestrator.supervisor.records import DiskFull, RecordWriter
from orchestrator.supervisor.seals import SealBroken, SealChecker


class WriterTest(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def write(self, count: int, **options: Any) -> List[bytes]:
        """Writes ``count`` output records and returns the segments' bytes."""
        writer = RecordWriter(self.folder, "run1", {"job": {"a": 1}}, **options)
        for i in range(count):
            writer.write_output("main", 7, "stdout", i, i, "text", "line %d\n" % i)
        writer.close()
        return [self.read(path) for path in sorted(glob.glob(os.path.join(self.folder, "*.jsonl")))]

    def read(self, path: str) -> bytes:
        with open(path, "rb") as file:
            return file.read()

    def test_segments_join_to_one_numbered_sealed_stream(self) -> None:
        segments = self.write(500, segment_bytes=4000)
        self.assertGreater(len(segments), 5)
        records = [json.loads(line) for segment in segments for line in segment.splitlines()]
        self.assertEqual([record["seq"] for record in records], list(range(len(records))))
        seal = ""
        for segment in segments:
            first, last = json.loads(segment.splitlines()[0]), json.loads(segment.splitlines()[-1])
            self.assertEqual((first["kind"], first["run"], first["prev"]), ("segment", "run1", seal))
            self.assertEqual(last["kind"], "seal")
            seal = last["sha256"]
        self.assertEqual(records[0]["job"], {"a": 1})
        self.assertNotIn("job", json.loads(segments[1].splitlines()[0]))
        self.assertEqual(SealChecker("run1").feed(b"".join(segments))[-1].sha256, seal)
        self.assertFalse(os.path.exists(os.path.join(self.folder, "reserve")))

    def test_changing_any_byte_breaks_a_seal(self) -> None:
        data = b"".join(self.write(20))
        for at in random.Random(3).sample(range(len(data)), 60):
            changed = bytes([data[at] ^ 1])
            with self.assertRaises((SealBroken, ValueError), msg=str(at)):
                altered = data[:at] + changed + data[at + 1 :]
                seals = SealChecker("run1").feed(altered)
                self.assert_complete(seals, len(altered))

    def assert_complete(self, seals: List[Any], size: int) -> None:
        """A seal that is no longer recognised as one leaves the end of the stream unsealed."""
        if not seals or seals[-1].end != size:
            raise SealBroken("unsealed end", 0)

    def test_dropping_swapping_or_moving_a_record_to_another_run_breaks_a_seal(self) -> None:
        lines = b"".join(self.write(20)).splitlines(True)
        for altered in (lines[:5] + lines[6:], [*lines[:5], lines[6], lines[5], *lines[7:]]):
            with self.assertRaises(SealBroken):
                SealChecker("run1").feed(b"".join(altered))
        with self.assertRaises(SealBroken):
            SealChecker("run2").feed(b"".join(lines))

    def test_a_checker_resumes_at_any_seal(self) -> None:
        data = b"".join(self.write(300, segment_bytes=4000))
        seals = SealChecker("run1").feed(data)
        for seal in seals[:-1]:
            start = seal.end - seal.line_bytes
            rest = SealChecker("run1", start=start, resume=True)
            self.assertEqual(rest.feed(data[start:]), [later for later in seals if later.end > seal.end])

    @unittest.skipUnless(os.geteuid() == 0, "mounting a small file system needs root")
    def test_a_full_disk_is_reported_and_the_last_records_are_still_written(self) -> None:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m,mode=700", "none", self.folder], check=True)
        self.addCleanup(subprocess.run, ["umount", self.folder], check=True)
        writer = RecordWriter(self.folder, "run1", {}, disk_full_wait_s=0.2)
        with self.assertRaises(DiskFull):
            for i in range(100):
                writer.write_output("main", 7, "stdout", i, i, "text", "x" * 1000000)
        writer.write("end", outcome="abandoned", reason="disk full")
        writer.close()
        data = self.read(os.path.join(self.folder, "000000.jsonl"))
        records = [json.loads(line) for line in data.splitlines()]
        self.assertEqual([record["seq"] for record in records], list(range(len(records))))
        self.assertEqual([record["kind"] for record in records[-2:]], ["end", "seal"])
        self.assertEqual(SealChecker("run1").feed(data)[-1].end, len(data))


class PumpTest(unittest.TestCase):
    def reassemble(self, chunks: List[bytes]) -> List[Dict[str, Any]]:
        """Pumps ``chunks`` through a pipe, one read each, and checks that offsets and lines add up."""
        read_fd, write_fd = os.pipe()
        found: List[Dict[str, Any]] = []

        def emit(off: int, line: int, key: str, value: str) -> None:
            found.append({"off": off, "line": line, "key": key, "value": value})

        pump = Pump(read_fd, emit)
        for chunk in chunks:
            os.write(write_fd, chunk)
            pump.read()
        os.close(write_fd)
        while pump.is_open:
            pump.read()
        data = b""
        for chunk_record in found:
            self.assertEqual(chunk_record["off"], len(data))
            self.assertEqual(chunk_record["line"], data.count(b"\n"))
            value = chunk_record["value"]
            data += value.encode() if chunk_record["key"] == "text" else base64.b64decode(value)
        self.assertEqual(data, b"".join(chunks))
        return found

    def test_any_bytes_in_any_chunks_reassemble(self) -> None:
        choose = random.Random(11)
        alphabet = [
            b"a",
            b"\n",
            b"\r",
            "é".encode(),
            "漢".encode(),
            "🎉".encode(),
            b"\xff",
            b"\xc3",
            b"\0",
            b"\xf0\x9f",
        ]
        for _ in range(300):
            data = b"".join(choose.choice(alphabet) for _ in range(choose.randrange(60)))
            cuts = sorted(choose.randrange(len(data) + 1) for _ in range(choose.randrange(6)))
            bounds = [0, *cuts, len(data)]
            self.reassemble([data[a:b] for a, b in zip(bounds, bounds[1:]) if a < b])

    def test_text_stays_text_wherever_a_read_cuts_it(self) -> None:
        data = "aé漢🎉".encode()
        for cut in range(1, len(data)):
            found = self.reassemble([data[:cut], data[cut:]])
            self.assertEqual({record["key"] for record in found}, {"text"}, cut)

    def test_a_binary_flood_makes_few_records(self) -> None:
        flood = bytes(random.Random(5).randrange(256) for _ in range(100000))
        self.assertLess(len(list(pieces(flood))), 20)
        self.assertEqual(b"".join(raw for _, raw, _ in pieces(flood)), flood)

    def test_the_tail_that_waits_is_shorter_than_a_character(self) -> None:
        self.assertEqual([unfinished_tail("🎉".encode()[:n]) for n in range(5)], [0, 1, 2, 3, 0])
        self.assertEqual(unfinished_tail(b"\xff"), 0)
        self.assertEqual(unfinished_tail(b"\x80\x80\x80"), 0)
        self.assertGreater(CHUNK_BYTES, 4)


class WireTest(unittest.TestCase):
    def read(self, data: bytes) -> Any:
        position = [0]

        def exactly(size: int) -> bytes:
            piece = data[position[0] : position[0] + size]
            position[0] += size
            if len(piece) < size:
                raise wire.WireError("ended")
            return piece

        return wire.read_frame(exactly)

    def test_a_frame_comes_back_as_it_was(self) -> None:
        for body in (b"", b"\n", bytes(range(256)) * 100):
            header, got = self.read(wire.pack({"a": ["é", None]}, body))
            self.assertEqual((header["a"], got), (["é", None], body))

    def test_what_is_no_frame_is_refused(self) -> None:
        for data in (
            b"",
            b"x",
            b"12",
            b"3\n{}",
            b"2\n{}",
            b'10\n{"size":-1}',
            b"99999999999\n",
            b"2\n[]",
            b"-1\n",
        ):
            with self.assertRaises(wire.WireError, msg=repr(data)):
                self.read(data)

    def test_cut_and_altered_frames_never_hang_or_raise_anything_else(self) -> None:
        choose = random.Random(17)
        whole = wire.pack({"kind": "x", "n": 5}, b"body of it")
        for _ in range(2000):
            data = bytearray(whole[: choose.randrange(len(whole) + 1)])
            for _ in range(choose.randrange(4)):
                if data:
                    data[choose.randrange(len(data))] = choose.randrange(256)
            try:
                self.read(bytes(data))
            except wire.WireError:
                pass


if __name__ == "__main__":
    unittest.main()
