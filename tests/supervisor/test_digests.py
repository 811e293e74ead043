"""What a host tells of a run in hashes: right blocks, short frames, changed code by name, nothing touched."""

import hashlib
import os
from typing import Any, Dict, List, Tuple
from unittest import mock

from orchestrator.supervisor import digests
from orchestrator.supervisor.cuts import segment_name
from orchestrator.supervisor.rundir import RunDir
from tests.supervisor.host import HostCase

BLOCK = digests.BLOCK_BYTES


class TestRecords(HostCase):
    def frames(self, segments: List[bytes], sizes: List[int]) -> List[Dict[str, Any]]:
        run = RunDir(self.root, "run1")
        os.makedirs(run.records)
        for index, data in enumerate(segments):
            with open(os.path.join(run.records, segment_name(index)), "wb") as file:
                file.write(data)
        return list(digests.of_records(run, sizes))

    def test_every_block_has_its_hash_and_the_last_ends_where_the_asker_does(self) -> None:
        first, second = os.urandom(2 * BLOCK + 5), os.urandom(300)
        found = self.frames([first, second, b"new"], [len(first), 100])
        parts = [first[:BLOCK], first[BLOCK : 2 * BLOCK], first[2 * BLOCK :]]
        self.assertEqual(
            found,
            [
                {"segment": 0, "bytes": len(first), "first": 0, "blocks": [sha256(part) for part in parts]},
                {"segment": 1, "bytes": 300, "first": 0, "blocks": [sha256(second[:100])]},
                {"segment": 2, "bytes": 3, "first": 0, "blocks": []},
            ],
        )

    def test_a_segment_that_is_shorter_than_the_askers_is_hashed_as_far_as_it_goes(self) -> None:
        found = self.frames([b"short"], [BLOCK * 3, 7])
        self.assertEqual(found, [{"segment": 0, "bytes": 5, "first": 0, "blocks": [sha256(b"short")]}])

    def test_a_long_segment_comes_in_several_frames(self) -> None:
        data = os.urandom(7 * BLOCK)
        with mock.patch.object(digests, "MOST_BLOCKS", 3):
            found = self.frames([data], [len(data)])
        self.assertEqual([frame["first"] for frame in found], [0, 3, 6])
        told = [block for frame in found for block in frame["blocks"]]
        self.assertEqual(told, [sha256(data[at : at + BLOCK]) for at in range(0, len(data), BLOCK)])


class TestTheRequest(HostCase):
    def ask(self, job: Dict[str, Any], entries: Any, sizes: List[int]) -> Tuple[List[Dict[str, Any]], Any]:
        request = {"op": "digests", "run": job["run_id"], "sizes": sizes}
        talk = self.talk(dict(request, bundle=job["bundle"], entries=entries))
        frames = [talk.header()]
        while not (frames[-1].get("end") or "error" in frames[-1]):
            frames.append(talk.header())
        return frames[:-1], frames[-1]

    def test_a_run_is_told_as_it_lies_there_and_left_so(self) -> None:
        job, entries, objects = self.job("print('hi')")
        self.records(self.start_job(job, entries, objects))
        with open(self.path(job["run_id"], "records", segment_name(0)), "rb") as file:
            written = file.read()
        unchanged = {
            "changed": [], "changed_count": 0, "damaged": [], "damaged_count": 0, "absent_count": 0,
        }  # fmt: skip
        frames, end = self.ask(job, entries, [len(written)])
        self.assertEqual([frame["blocks"] for frame in frames], [[sha256(written)]])
        self.assertTrue(end["exists"])
        self.assertEqual(end["bundle"], unchanged)

        with open(self.path(job["run_id"], "code", "probe", "go.py"), "a", encoding="utf-8") as text:
            text.write("# changed\n")
        with open(self.path(job["run_id"], "code", "probe", "more.py"), "w", encoding="utf-8"):
            pass
        kept = [os.path.join(self.root, "objects", entry[3][:2], entry[3]) for entry in entries]
        with open(kept[1], "a", encoding="utf-8") as text:
            text.write("# changed\n")
        os.unlink(kept[0])
        _, end = self.ask(job, entries, [])
        self.assertEqual(end["bundle"]["changed"], ["probe/go.py", "probe/more.py"])
        self.assertEqual(end["bundle"]["damaged"], [entries[1][3]])
        self.assertEqual(end["bundle"]["absent_count"], 1)
        self.assertTrue(os.path.exists(kept[1]))

    def test_a_run_that_is_not_there_has_nothing_and_is_not_made(self) -> None:
        job, entries, _ = self.job("")
        frames, end = self.ask(job, None, [5])
        self.assertEqual((frames, end["exists"], end["bundle"]), ([], False, None))
        self.assertFalse(os.path.exists(self.path(job["run_id"])))
        _, end = self.ask(dict(job, bundle="0" * 64), entries, [])
        self.assertEqual(end["error"], "damaged")
        _, end = self.ask(dict(job, run_id="../x"), None, [])
        self.assertEqual(end["error"], "refused")


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
