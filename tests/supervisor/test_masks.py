"""Secrets are taken out of every stream and record, and nothing else is."""

import glob
import os
import random
import unittest
from typing import Any, Dict, List, Set

from orchestrator.supervisor import wire
from orchestrator.supervisor.masks import MASK, Masks, StreamMask
from orchestrator.supervisor.rundir import RunDir
from tests.supervisor.host import HostCase, Talk, of_kind

VALUE = "hf_s3cr3t-Value"


def reference(data: bytes, secrets: Set[bytes]) -> bytes:
    """Masks byte by byte: what belongs to an occurrence goes, occurrences that overlap are one mask."""
    masked: Set[int] = set()
    out, covered_to = b"", 0
    for start in range(len(data)):
        ends = [start + len(secret) for secret in secrets if data.startswith(secret, start)]
        if ends:
            masked.update(range(start, max(ends)))
            out += MASK if start >= covered_to else b""
            covered_to = max(covered_to, *ends)
        if start not in masked:
            out += data[start : start + 1]
    return out


def in_chunks(mask: StreamMask, data: bytes, cuts: List[int]) -> bytes:
    bounds = [0, *sorted(cuts), len(data)]
    return b"".join(mask.feed(data[a:b]) for a, b in zip(bounds, bounds[1:])) + mask.flush()


class StreamTest(unittest.TestCase):
    def test_any_secrets_in_any_chunks_give_what_the_whole_gives(self) -> None:
        for seed in range(3000):
            rng = random.Random(seed)
            letters = "ab" if seed % 2 else 'aé"\\'
            secrets = {
                "".join(rng.choice(letters) for _ in range(rng.randrange(1, 6)))
                for _ in range(rng.randrange(1, 4))
            }
            data = "".join(rng.choice(letters + "x\n") for _ in range(rng.randrange(40))).encode()
            masks = Masks(secrets)
            cuts = [rng.randrange(len(data) + 1) for _ in range(rng.randrange(6))]
            told = in_chunks(masks.stream(), data, cuts)
            self.assertEqual(told, reference(data, set(masks._needles)), (seed, secrets, data, cuts))

    def test_one_secret_that_does_not_overlap_itself_goes_as_bytes_replace_would_have_it(self) -> None:
        for seed in range(300):
            rng = random.Random(seed)
            parts = [rng.choice([VALUE.encode(), b"hf_s3", b"x", b"\n", b"\xff", b"e"]) for _ in range(30)]
            data = b"".join(parts)
            cuts = [rng.randrange(len(data) + 1) for _ in range(10)]
            told = in_chunks(Masks([VALUE]).stream(), data, cuts)
            self.assertEqual(told, data.replace(VALUE.encode(), MASK))

    def test_only_a_tail_that_may_begin_a_secret_waits(self) -> None:
        mask = Masks([VALUE]).stream()
        self.assertEqual(mask.feed(b"step 1 hf_s3"), b"step 1 ")
        self.assertEqual(mask.feed(b"x"), b"hf_s3x")
        self.assertEqual(mask.feed(b"hf_s3\n"), b"hf_s3\n")
        self.assertEqual(mask.feed(VALUE[:-1].encode()), b"")
        self.assertEqual(mask.feed(VALUE[-1:].encode()), MASK)
        self.assertEqual(mask.flush(), b"")

    def test_a_secret_inside_a_longer_one_leaves_nothing_of_it(self) -> None:
        masks = Masks(["password", "my-password-1", "word-1-and-more"])
        self.assertEqual(masks.text("a my-password-1-and-more z"), "a *** z")
        self.assertEqual(masks.text("passwordpassword"), "******")

    def test_values_are_masked_in_every_spelling_that_json_and_python_give_them(self) -> None:
        masks = Masks(['p"ss\\wörd'])
        event = {"a": ['{"t": "p\\"ss\\\\w\\u00f6rd"}', repr({"t": 'p"ss\\wörd'})], 'p"ss\\wörd': 1.5}
        self.assertEqual(masks.value(event), {"a": ['{"t": "***"}', "{'t': '***'}"], "***": 1.5})

    def test_the_end_of_a_text_that_was_cut_off_shows_no_part_of_a_secret(self) -> None:
        masks = Masks([VALUE])
        self.assertEqual(masks.text("bad token hf_s3cr", is_cut=True), "bad token ***")
        self.assertEqual(masks.text("bad token hf_s3cr"), "bad token hf_s3cr")

    def test_the_supervisor_s_own_words_stay_when_a_secret_is_one_of_them(self) -> None:
        fields = {"outcome": "cancelled", "reason": "cancelled on request"}
        masked = Masks(["cancelled"]).record(fields)
        self.assertEqual(masked, {"outcome": "cancelled", "reason": "*** on request"})


class RunTest(HostCase):
    def start_with(self, secrets: Dict[str, str], job: Dict[str, Any], entries: Any, objects: Any) -> Talk:
        cursor = {"segment": 0, "offset": 0}
        request = {"op": "start", "job": job, "entries": entries, "cursor": cursor, "secrets": secrets}
        talk = self.talk(request)
        for sha256 in talk.header()["need"]:
            talk.send_raw(wire.pack({"object": sha256}, objects[sha256]))
        talk.answer = talk.header()
        return talk

    def test_a_secret_reaches_the_payload_and_no_record_or_file(self) -> None:
        secret = VALUE + '"é'
        job, entries, objects = self.job(
            """
            import json, os, subprocess, sys, time
            secret = os.environ["TOKEN"]
            assert len(secret) == 17
            raw = secret.encode()
            for i in range(len(raw)):
                os.write(1, raw[i:i + 1])
                time.sleep(0.01)
            os.write(1, b"|\\xff" + raw + b"|hf_s3")
            os.write(2, raw * 3 + b"\\n")
            fd = int(os.environ["ORCH_EVENTS_FD"].split(":")[0])
            os.write(fd, json.dumps({"kind": "note", secret: [secret]}).encode() + b"\\n")
            os.write(fd, b"x" * 190 + raw + b"\\n")
            facts = {"kind": "facts", "environment": {"TOKEN": secret + "!"}}
            os.write(fd, json.dumps(facts).encode() + b"\\n")
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)", secret])
            raise ValueError("x" * 4090 + secret)
            """,
            secrets={"TOKEN": "TOKEN"},
            grace_s=0.5,
        )
        records = self.records(self.start_with({"TOKEN": secret}, job, entries, objects))
        stdout = [record for record in of_kind(records, "out") if record["stream"] == "stdout"]
        self.assertEqual("".join(record.get("text", "?") for record in stdout), "***|?***|hf_s3")
        stderr = [record["text"] for record in of_kind(records, "out") if record["stream"] == "stderr"]
        self.assertTrue("".join(stderr).startswith("*********\n"))
        [spawn] = of_kind(records, "spawn")
        self.assertEqual(spawn["env"]["TOKEN"], "***")
        self.assertEqual(of_kind(records, "event")[0]["event"], {"kind": "note", "***": ["***"]})
        self.assertTrue(of_kind(records, "event_refused")[0]["head"].endswith("x***"))
        told = [record["mismatches"] for record in of_kind(records, "facts") if "mismatches" in record]
        self.assertIn(["TOKEN: asked for '***', the process has '***!'"], told)
        self.assertEqual(of_kind(records, "exception")[0]["message"], "x" * 4090 + "***")
        self.assertIn("***", of_kind(records, "leftover")[0]["processes"][0]["argv"])
        self.assertEqual(of_kind(records, "end")[0]["code"], 1)
        for path in glob.glob(os.path.join(self.root, "**"), recursive=True):
            if os.path.isfile(path):
                with open(path, "rb") as file:
                    self.assertNotIn(VALUE.encode(), file.read(), path)

    def test_a_start_that_is_repeated_finds_the_run_and_starts_nothing(self) -> None:
        job, entries, objects = self.job("print('once')", secrets={"TOKEN": "TOKEN"})
        for is_new in (True, False):
            talk = self.start_with({"TOKEN": VALUE}, job, entries, objects)
            self.assertIs(talk.answer["started"], is_new)
            told = [record["text"] for record in of_kind(self.records(talk), "out")]
            self.assertEqual("".join(told), "once\n")

    def test_a_start_that_broke_off_before_its_first_record_gets_its_secrets_from_the_next(self) -> None:
        code = "import os; print(len(os.environ['TOKEN']), os.environ['TOKEN'])"
        job, entries, objects = self.job(code, secrets={"TOKEN": "TOKEN"})
        os.makedirs(self.root, mode=0o700)
        lock_fd = RunDir(self.root, job["run_id"]).claim(job)
        assert lock_fd is not None
        os.close(lock_fd)
        talk = self.start_with({"TOKEN": VALUE}, job, entries, objects)
        self.assertIs(talk.answer["started"], True)
        told = [record["text"] for record in of_kind(self.records(talk), "out")]
        self.assertEqual("".join(told), "%d ***\n" % len(VALUE))

    def test_a_start_whose_secrets_are_not_those_of_its_job_is_refused(self) -> None:
        job, entries, _ = self.job("print(1)", secrets={"TOKEN": "TOKEN"})
        for secrets in ({}, {"OTHER": VALUE}):
            talk = self.talk(
                {"op": "start", "job": job, "entries": entries, "cursor": None, "secrets": secrets}
            )
            answer = talk.header()
            self.assertEqual(answer["error"], "refused")
            self.assertNotIn(VALUE, answer["message"])
        self.assertFalse(os.path.exists(self.path(job["run_id"])))
