"""What a host tells of all its runs: in pages, bounded, whoever wrote what stands there."""

import json
import os
import time
import unittest
from typing import Any, Dict, List, Optional

from orchestrator.supervisor import listing
from tests.supervisor.host import HostCase

ENDLESS = "import os, time\nos.write(1, b'printed\\n')\ntime.sleep(600)\n"


class TestListing(HostCase):
    def list(self, runs: Optional[List[str]] = None) -> Dict[str, Dict[str, Any]]:
        talk = self.talk({"op": "list", "runs": runs})
        found: Dict[str, Dict[str, Any]] = {}
        while not (header := talk.header()).get("end"):
            found.update({entry["run"]: entry for entry in header["page"]})
        return found

    def write_run(self, run_id: str, line: str) -> None:
        os.makedirs(self.path(run_id, "records"))
        with open(self.path(run_id, "records", "000000.jsonl"), "w", encoding="utf-8") as file:
            file.write(line)

    def test_a_run_that_lives_and_one_that_ended_are_told_apart(self) -> None:
        self.run_code("print('done')")
        living = self.start(ENDLESS)
        next(living.pieces())
        ended, alive = self.run_ids
        found = self.list()
        self.assertEqual({ended: "ended", alive: "alive"}, {run: found[run]["standing"] for run in found})
        self.assertNotIn("text", found[alive])

    def test_jobs_come_for_the_runs_that_are_asked_for(self) -> None:
        self.run_code("pass", env={"TOKEN": "value"})
        self.run_code("pass")
        first, _ = self.run_ids
        found = self.list([first])
        self.assertEqual([first], list(found))
        self.assertEqual("probe.go", json.loads(found[first]["text"])["job"]["module"])

    def test_the_digest_of_a_job_is_that_of_the_job_without_its_values(self) -> None:
        self.run_code("pass", env={"TOKEN": "value"})
        (run_id,) = self.run_ids
        with open(self.path(run_id, "job.json"), encoding="utf-8") as file:
            job = json.load(file)
        masked = dict(job, env={"TOKEN": listing.MASK})
        self.assertEqual(listing.job_digest(masked), self.list()[run_id]["digest"])
        self.assertNotEqual(listing.job_digest(dict(job, params={})), self.list()[run_id]["digest"])

    def test_what_cannot_be_read_is_named_without_more(self) -> None:
        self.write_run("cut", '{"seq":0,"job":{}')
        self.write_run("noise", "\x1b[2J\n")
        self.write_run("surrogate", "")
        with open(self.path("surrogate", "records", "000000.jsonl"), "wb") as file:
            file.write(b'{"run":"surrogate","t":1.0,"job":"\xed\xa0\x80"}\n')
        self.write_run("deep", "[" * 100000 + "\n")
        self.write_run("long", '{"run":"%s"}\n' % ("x" * listing.FIRST_BYTES))
        os.makedirs(self.path("empty"))
        os.makedirs(self.path("pipe", "records"))
        os.mkfifo(self.path("pipe", "records", "000000.jsonl"))
        os.makedirs(self.path("lock pipe"))
        os.mkfifo(self.path("lock pipe", "lock"))
        found = self.list()
        self.assertEqual(
            {"lock pipe", "cut", "noise", "surrogate", "deep", "long", "empty", "pipe"}, set(found)
        )
        self.assertEqual("never started", found["empty"]["standing"])
        self.assertFalse(any("digest" in entry for entry in found.values()))

    def test_links_and_files_among_the_runs_are_no_runs(self) -> None:
        self.write_run("real", "{}\n")
        os.symlink(self.path("real"), self.path("link"))
        with open(self.path("file"), "w", encoding="utf-8"):
            pass
        self.assertEqual(["real"], list(self.list()))

    def test_thousands_of_runs_come_in_one_conversation(self) -> None:
        line = json.dumps({"run": "x", "t": time.time(), "job": {"env": {}}}) + "\n"
        for number in range(2000):
            self.write_run("many%05d" % number, line)
        self.assertEqual(2000, len(self.list()))


if __name__ == "__main__":
    unittest.main()
