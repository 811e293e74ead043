"""What a host tells and sends of a run's artifacts: what is there, nothing from elsewhere, hashed."""

import hashlib
import os
import socket
from typing import Any, Dict, List, Tuple
from unittest import mock

from orchestrator.supervisor import artifacts, wire
from orchestrator.supervisor.rundir import RunDir
from tests.supervisor.host import HostCase

DATA = os.urandom(wire.PIECE_BYTES + 7)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class ArtifactsCase(HostCase):
    def setUp(self) -> None:
        super().setUp()
        self.rundir = RunDir(self.root, "run1")
        os.makedirs(self.rundir.artifacts)

    def put(self, path: str, data: bytes = b"x") -> str:
        full = os.path.join(self.rundir.artifacts, path)
        os.makedirs(os.path.dirname(full), exist_ok=True)
        with open(full, "wb") as file:
            file.write(data)
        return full

    def listed(self) -> Dict[str, str]:
        return {entry["path"]: entry["kind"] for page in artifacts.pages(self.rundir) for entry in page}

    def wanted(self, path: str, offset: int = 0, prefix: str = "") -> List[Any]:
        status = os.lstat(os.path.join(self.rundir.artifacts, path))
        return [path, status.st_size, status.st_mtime_ns, offset, prefix]

    def sent(self, *files: List[Any]) -> Tuple[List[Dict[str, Any]], bytes]:
        frames = list(artifacts.send(self.rundir, files))
        headers = [header for header, _ in frames if not header.get("data")]
        return headers, b"".join(body for _, body in frames)


class TestTheList(ArtifactsCase):
    def test_everything_is_told_by_its_kind_and_no_link_is_followed(self) -> None:
        outside = os.path.join(self.base, "outside")
        os.makedirs(outside)
        with open(os.path.join(outside, "secret"), "w", encoding="utf-8"):
            pass
        self.put("deep/er/a.json", b"12345")
        self.put("a b'\n.txt")
        os.symlink(outside, os.path.join(self.rundir.artifacts, "folder link"))
        os.symlink(os.path.join(outside, "secret"), os.path.join(self.rundir.artifacts, "link"))
        os.mkfifo(os.path.join(self.rundir.artifacts, "pipe"))
        self.addCleanup(os.chdir, os.getcwd())
        os.chdir(self.rundir.artifacts)  # a socket's path is short
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind("socket")
        expected = {
            "a b'\n.txt": "file",
            "deep/er/a.json": "file",
            "folder link": "link",
            "link": "link",
            "pipe": "pipe",
            "socket": "socket",
        }
        self.assertEqual(self.listed(), expected)

    def test_a_name_that_is_no_text_travels_as_surrogates_and_back(self) -> None:
        full = os.path.join(os.fsencode(self.rundir.artifacts), b"\xff\xfe")
        with open(full, "wb") as file:
            file.write(b"data")
        (path,) = self.listed()
        self.assertEqual(path, "\udcff\udcfe")
        status = os.stat(full)
        headers, data = self.sent([path, 4, status.st_mtime_ns, 0, ""])
        self.assertEqual((headers[-1], data), ({"sha256": sha256(b"data")}, b"data"))

    def test_folders_in_each_other_without_end_are_told_and_left(self) -> None:
        deep = "/".join("d" * (artifacts.MOST_DEPTH + 5))
        self.put(deep + "/file")
        with mock.patch.object(artifacts, "MOST_DEPTH", 3):
            self.assertEqual(self.listed(), {"d/d/d": "deep"})
        self.assertEqual(self.listed(), {deep[: 2 * artifacts.MOST_DEPTH - 1]: "deep"})

    def test_more_than_anybody_fetches_is_refused_in_words(self) -> None:
        for index in range(5):
            self.put("f%d" % index)
        with mock.patch.object(artifacts, "MOST_ENTRIES", 4), self.assertRaisesRegex(ValueError, "pack"):
            self.listed()

    def test_an_artifacts_folder_that_became_a_link_leads_nowhere(self) -> None:
        os.rmdir(self.rundir.artifacts)
        self.assertEqual(self.listed(), {})
        os.symlink("/etc", self.rundir.artifacts)
        with self.assertRaisesRegex(ValueError, "is none"):
            self.listed()
        with self.assertRaisesRegex(ValueError, "is none"):
            self.sent(["passwd", 1, 1, 0, ""])


class TestTheFiles(ArtifactsCase):
    def test_a_file_comes_whole_with_its_hash(self) -> None:
        self.put("a/b.bin", DATA)
        self.put("empty", b"")
        headers, data = self.sent(self.wanted("a/b.bin"), self.wanted("empty"))
        self.assertEqual(data, DATA)
        ends = [{"from": 0}, {"sha256": sha256(DATA)}, {"from": 0}, {"sha256": sha256(b"")}]
        self.assertEqual(headers, ends)

    def test_the_rest_comes_after_a_beginning_that_is_the_same_and_all_of_it_after_another(self) -> None:
        self.put("f", DATA)
        headers, data = self.sent(self.wanted("f", 100, sha256(DATA[:100])))
        self.assertEqual((headers, data), ([{"from": 100}, {"sha256": sha256(DATA)}], DATA[100:]))
        headers, data = self.sent(self.wanted("f", 100, sha256(DATA[1:101])))
        self.assertEqual((headers, data), ([{"from": 0}, {"sha256": sha256(DATA)}], DATA))

    def test_a_file_that_changes_before_or_while_it_is_read_says_so(self) -> None:
        full = self.put("f", DATA)
        wanted = self.wanted("f")
        os.utime(full, ns=(1, 1))
        self.assertEqual(self.sent(wanted), ([{"failed": "changed"}], b""))
        frames = artifacts.send(self.rundir, [self.wanted("f")])
        self.assertEqual(next(frames)[0], {"from": 0})
        with open(full, "ab") as file:
            file.write(b"more")
        self.assertEqual(list(frames)[-1][0], {"failed": "changed"})
        frames = artifacts.send(self.rundir, [self.wanted("f")])
        next(frames)
        os.truncate(full, 3)
        self.assertEqual(list(frames)[-1][0], {"failed": "changed"})

    def test_a_link_that_takes_the_place_of_a_file_or_folder_leads_nowhere(self) -> None:
        outside = os.path.join(self.base, "outside")
        os.makedirs(outside)
        with open(os.path.join(outside, "f"), "wb") as file:
            file.write(b"secret")
        full = self.put("folder/f", b"public")
        wanted = self.wanted("folder/f")
        os.unlink(full)
        os.symlink(os.path.join(outside, "f"), full)
        headers, data = self.sent(wanted)
        self.assertEqual((headers[0]["failed"], data), ("unreadable", b""))
        os.unlink(full)
        os.rmdir(os.path.dirname(full))
        os.symlink(outside, os.path.dirname(full))
        headers, data = self.sent(wanted)
        self.assertEqual((headers[0]["failed"], data), ("unreadable", b""))

    def test_a_folder_that_is_swapped_for_a_link_during_the_walk_leads_nowhere(self) -> None:
        outside = os.path.join(self.base, "outside")
        os.makedirs(outside)
        with open(os.path.join(outside, "secret"), "wb"):
            pass
        folder = os.path.dirname(self.put("folder/f"))
        real = os.stat

        def swap(name: Any, **options: Any) -> os.stat_result:
            status = real(name, **options)
            if name == b"folder":
                os.rename(folder, folder + ".was")
                os.symlink(outside, folder)
            return status

        with mock.patch.object(os, "stat", swap):
            self.assertEqual(self.listed(), {"folder": "closed"})

    def test_pipes_and_paths_that_lead_out_are_not_opened(self) -> None:
        os.mkfifo(os.path.join(self.rundir.artifacts, "pipe"))
        self.assertEqual(self.sent(self.wanted("pipe")), ([{"failed": "changed"}], b""))
        self.assertEqual(self.sent(["gone", 1, 1, 0, ""]), ([{"failed": "gone"}], b""))
        for path in ("../job.json", "/etc/passwd", "", "a//b", ".", "a/.."):
            with self.assertRaisesRegex(ValueError, "not a path"):
                self.sent([path, 1, 1, 0, ""])


class TestTheRequest(ArtifactsCase):
    def test_pages_and_then_files_come_over_a_conversation(self) -> None:
        self.put("f", b"data")
        os.chmod(self.root, 0o700)
        talk = self.talk({"op": "artifacts", "run": "run1", "files": None})
        (entry,) = talk.header()["page"]
        self.assertEqual((entry["path"], entry["size"], talk.header()["end"]), ("f", 4, True))
        talk = self.talk({"op": "artifacts", "run": "run1", "files": [self.wanted("f")]})
        frames = [talk.frame() for _ in range(4)]
        self.assertEqual(b"".join(body for _, body in frames), b"data")
        self.assertEqual((frames[2][0]["sha256"], frames[3][0]["end"]), (sha256(b"data"), True))
        talk = self.talk({"op": "artifacts", "run": "run1", "files": [["../x", 1, 1, 0, ""]]})
        self.assertEqual(talk.header()["error"], "refused")
        talk = self.talk({"op": "artifacts", "run": "none", "files": None})
        self.assertEqual(talk.header()["error"], "unknown-run")
