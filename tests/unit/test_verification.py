"""Every kind of tampering with a run's records, here or on its host, is found and named by place."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.bundle import Bundle, ObjectStore, build_bundle
from orchestrator.checks import (
    Check,
    Status,
    check_bundle,
    check_job,
    check_pins,
    local_checks,
    newest_arrived,
)
from orchestrator.conversation import Cursor, Piece
from orchestrator.inventory import Host
from orchestrator.mirror import Mirror
from orchestrator.mirror_scan import Place, place_at, scan
from orchestrator.remote import BundleState, SegmentDigest
from orchestrator.run_folder import RunFolder
from orchestrator.supervisor import cuts, digests
from orchestrator.supervisor.records import RecordWriter
from orchestrator.supervisor.rundir import RunDir
from orchestrator.transports import connect
from orchestrator.verification import Verification, check_code, first_difference, host_checks

RUN, OTHER = "run1", "run2"
ENV = {"A": "1", "B": "2"}
JOB: dict[str, Any] = {"run_id": RUN, "module": "probe.go", "params": {"lr": 0.1}, "env": ENV}
END = {"outcome": "exited", "code": 0}


class Case:
    """One run, written by the real writer on a "host" and mirrored by the real mirror."""

    def __init__(self, base: Path) -> None:
        self.host_root = base / "host"
        home = base / "home"
        home.mkdir()
        self.store = ObjectStore(home)
        payload = base / "payloads" / "probe"
        payload.mkdir(parents=True)
        (payload / "go.py").write_text("print('hello')\n")
        self.bundle = build_bundle(payload, self.store)
        self.job = {**JOB, "bundle": self.bundle.id}
        self.folder = RunFolder(home, RUN)
        self.host_records = self.write(RUN)
        self.folder.observe("created", job={**self.job, "env": ["A", "B"]})
        self.mirror()

    def write(self, run_id: str, word: str = "line", segment_bytes: int = 3000) -> Path:
        run = RunDir(str(self.host_root), run_id)
        folder = Path(run.records)
        self.host_root.mkdir(mode=0o700, exist_ok=True)
        folder.mkdir(parents=True)
        bundle = {"id": self.bundle.id, "files": 1, "bytes": self.bundle.size_bytes}
        header = {"job": {**self.job, "run_id": run_id}, "bundle": bundle}
        clock = iter(range(10**6))
        writer = RecordWriter(
            str(folder), run_id, header, lambda: float(next(clock)), segment_bytes=segment_bytes
        )
        for i in range(60):
            writer.write_output("main", 7, "stderr", 14 * i, 2 * i, "text", f"{word} {i:02}\nthen\n")
            if i % 10 == 9:
                writer.seal()
        writer.write("end", **END)
        writer.close()
        return folder

    def mirror(self) -> None:
        mirror = Mirror.acquire(self.folder, "box")
        assert mirror is not None
        with mirror:
            for index, path in enumerate(sorted(self.host_records.glob("*.jsonl"))):
                if index >= mirror.cursor.segment:
                    offset = mirror.cursor.offset if index == mirror.cursor.segment else 0
                    mirror.append(Piece(Cursor(segment=index, offset=offset), path.read_bytes()[offset:]))

    def here(self) -> dict[str, Check]:
        arrived = newest_arrived(self.folder)
        checks = local_checks(self.folder, scan(self.folder), arrived, self.store, self.bundle.id)
        return {check.name: check for check in checks}

    def there(self) -> Check:
        """Asks a real supervisor about the records."""
        return self.all_there()[0]

    def all_there(self, manifest: Bundle | None = None) -> list[Check]:
        self.host_root.mkdir(mode=0o700, exist_ok=True)
        host = Host(
            name="box", transport="local", address="box", python=sys.executable, root=str(self.host_root)
        )
        with connect(host) as transport:
            checks = host_checks(transport, self.folder, scan(self.folder), self.bundle.id, manifest)
        assert [check.name for check in checks] == ["host's records", "host's code", "host's objects"]
        return checks

    def change(self, path: Path, old: bytes, new: bytes) -> int:
        """Replaces bytes once; returns where the first changed one is."""
        data = path.read_bytes()
        assert old in data
        path.write_bytes(data.replace(old, new, 1))
        same = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), len(old))
        return data.index(old) + same

    @property
    def host_segment(self) -> Path:
        return self.host_records / cuts.segment_name(1)


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


def wrong(checks: dict[str, Check]) -> set[str]:
    return {name for name, check in checks.items() if check.status is Status.NOT_OK}


def test_a_run_that_nobody_touched_is_proved(case: Case) -> None:
    checks = [*case.here().values(), case.there()]
    assert {check.status for check in checks} == {Status.OK}, checks
    assert len(scan(case.folder).sizes) > 2


class TestTheMirror:
    def test_a_flipped_byte_breaks_its_seal_and_is_named_to_the_byte_with_the_hosts_help(
        self, case: Case
    ) -> None:
        at = case.change(case.folder.segment(1), b"line 33\\nthen", b"line 33\\nThen")
        checks = case.here()
        assert wrong(checks) == {"seals"}
        assert "seal" in checks["seals"].says
        place, there = checks["seals"].place, case.there()
        assert place is not None
        assert place.segment == 1
        assert place.offset < at
        assert there.status is Status.NOT_OK
        assert there.place is not None
        assert (there.place.segment, there.place.offset) == (1, at)
        assert there.place.record == f"{RUN}/main.stderr:{2 * 33 + 2}"

    def test_a_removed_record_is_a_gap(self, case: Case) -> None:
        path = case.folder.segment(0)
        lines = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join(lines[:5] + lines[6:]))
        checks = case.here()
        assert wrong(checks) >= {"numbers", "seals", "pinned seals"}
        assert "record 6 stands where record 5 should" in checks["numbers"].says
        assert checks["numbers"].place == Place(
            segment=0, offset=len(b"".join(lines[:5])), seq=6, record=f"{RUN}/main.stderr:11"
        )

    def test_records_of_another_run_with_seals_of_their_own_are_foreign(self, case: Case) -> None:
        other = case.write(OTHER)
        for path in other.glob("*.jsonl"):
            shutil.copy(path, case.folder.records / path.name)
        checks = case.here()
        assert wrong(checks) >= {"segments", "seals", "pinned seals", "job"}
        assert checks["segments"].says == f"segment 0 is of run {OTHER}"

    def test_one_segment_of_another_run_is_foreign(self, case: Case) -> None:
        shutil.copy(case.write(OTHER) / cuts.segment_name(1), case.folder.segment(1))
        checks = case.here()
        assert wrong(checks) >= {"segments", "seals", "pinned seals"}
        assert checks["segments"].place is not None
        assert checks["segments"].place.segment == 1

    def test_a_segment_of_the_same_run_written_anew_does_not_continue_the_one_before(
        self, case: Case
    ) -> None:
        shutil.rmtree(case.host_root)
        shutil.copy(case.write(RUN, "LINE") / cuts.segment_name(1), case.folder.segment(1))
        assert case.here()["segments"].says.startswith("segment 1 does not continue the seal")

    @pytest.mark.parametrize(
        ("old", "new", "says"),
        [
            (b'"kind":"segment"', b'"kind":"heartbeat"', "does not begin with its header"),
            (b'"run":"run1"', b'"run":"run9"', "is of run run9"),
            (b'"version":1', b'"version":2', "has format 2"),
            (b'"first":', b'"first":9', "says that it begins with 9"),
            (b'"prev":"', b'"prev":"0', "does not continue the seal"),
        ],
    )
    def test_a_header_is_checked_word_by_word(self, case: Case, old: bytes, new: bytes, says: str) -> None:
        case.change(case.folder.segment(1), old, new)
        assert says in case.here()["segments"].says

    def test_a_mirror_that_was_written_and_sealed_anew_is_not_what_was_pinned(self, case: Case) -> None:
        shutil.rmtree(case.host_root)
        for path in case.write(RUN, "LINE").glob("*.jsonl"):
            shutil.copy(path, case.folder.records / path.name)
        checks = case.here()
        assert wrong(checks) == {"pinned seals"}
        assert "not the one that was pinned" in checks["pinned seals"].says

    def test_a_removed_segment_is_missing(self, case: Case) -> None:
        case.folder.segment(1).unlink()
        checks = case.here()
        assert wrong(checks) >= {"numbers", "segments", "seals", "pinned seals"}
        assert checks["segments"].says == "segment 1 is missing"
        assert "goes on after it" in case.there().says

    def test_a_mirror_cut_at_a_seal_lacks_what_was_pinned(self, case: Case) -> None:
        last = len(scan(case.folder).sizes) - 1
        case.folder.segment(last).unlink()
        assert wrong(case.here()) == {"pinned seals"}

    def test_a_record_after_the_end_is_named(self, case: Case) -> None:
        path = case.folder.segment(len(scan(case.folder).sizes) - 1)
        count = scan(case.folder).count
        path.write_bytes(path.read_bytes() + b'{"seq":%d,"t":1.0,"kind":"heartbeat"}\n' % count)
        assert "after the end of the run" in case.here()["numbers"].says

    def test_what_only_looks_like_a_seal_is_none(self, case: Case) -> None:
        path = case.folder.segment(len(scan(case.folder).sizes) - 1)
        count = scan(case.folder).count
        path.write_bytes(path.read_bytes() + b'{"seq":%d,"t":1.0,"kind":"seal"}\n' % count)
        assert "is no seal" in case.here()["seals"].says

    def test_a_line_that_is_half_here_is_left_for_later(self, case: Case) -> None:
        path = case.folder.segment(0)
        seal_end = path.read_bytes().index(b"\n", path.read_bytes().index(b'"kind":"seal"')) + 1
        path.write_bytes(path.read_bytes()[: seal_end + 40])
        for index in range(1, len(scan(case.folder).sizes)):
            case.folder.segment(index).unlink()
        found = scan(case.folder)
        assert (found.unsealed_bytes, found.has_ended) == (40, False)
        assert (found.number_problem, found.segment_problem, found.seal_problem) == (None, None, None)

    def test_an_edited_pin_is_found(self, case: Case) -> None:
        path = case.folder.path / "observations.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        seals = [entry for entry in lines if entry["kind"] == "seal"]
        for change in ({"sha256": "0" * 64}, {"line_start": 3}, {"seq": 10**6}):
            edited = [{**entry, **change} if entry is seals[1] else entry for entry in lines]
            path.write_text("".join(json.dumps(entry) + "\n" for entry in edited))
            assert wrong(case.here()) == {"pinned seals"}

    def test_a_pin_that_was_taken_out_is_found(self, case: Case) -> None:
        path = case.folder.path / "observations.jsonl"
        lines = path.read_text().splitlines(keepends=True)
        second = [line for line in lines if '"kind": "seal"' in line][1]
        path.write_text("".join(line for line in lines if line != second))
        assert "never pinned" in case.here()["pinned seals"].says

    def test_seals_that_arrive_while_the_mirror_is_read_are_no_finding(self, case: Case) -> None:
        path = case.folder.segment(len(scan(case.folder).sizes) - 1)
        whole = path.read_bytes()
        path.write_bytes(whole[:-300])
        found = scan(case.folder)
        path.write_bytes(whole)
        before = max(found.seals)
        assert newest_arrived(case.folder) > before
        assert check_pins(case.folder, found, before).status is Status.OK
        assert check_pins(case.folder, found, newest_arrived(case.folder)).status is Status.NOT_OK

    def test_observations_that_are_no_pins_are_found(self, case: Case) -> None:
        case.folder.observe("seal", sha256="0" * 64)
        assert wrong(case.here()) == {"pinned seals"}


class TestTheHost:
    def test_a_flipped_byte_is_named_with_its_record(self, case: Case) -> None:
        at = case.change(case.host_segment, b"line 35", b"line 36")
        assert not wrong(case.here())
        there = case.there()
        assert there.status is Status.NOT_OK
        assert there.place is not None
        assert (there.place.segment, there.place.offset) == (1, at)
        assert there.place.record == f"{RUN}/main.stderr:{2 * 35 + 1}"

    def test_a_byte_far_into_a_long_segment_is_named(self, case: Case) -> None:
        shutil.rmtree(case.host_root)
        path = case.write(RUN, "x" * 60_000, segment_bytes=10**8) / cuts.segment_name(0)
        shutil.rmtree(case.folder.records)
        shutil.copytree(path.parent, case.folder.records)
        assert case.there().status is Status.OK
        at = case.change(path, b"x 47\\nthen", b"x 47\\nThen")
        assert at > 2 * digests.BLOCK_BYTES
        place = case.there().place
        assert place is not None
        assert (place.offset, place.record) == (at, f"{RUN}/main.stderr:{2 * 47 + 2}")

    @pytest.mark.parametrize("left", [0, 1, 500])
    def test_a_cut_segment_says_how_much_is_left(self, case: Case, left: int) -> None:
        case.host_segment.write_bytes(case.host_segment.read_bytes()[:left])
        there = case.there()
        assert there.status is Status.NOT_OK
        assert f"the host has {left} bytes of segment 1, the mirror" in there.says

    def test_a_segment_that_is_gone_is_named(self, case: Case) -> None:
        case.host_segment.unlink()
        assert "the host lacks segment 1" in case.there().says

    def test_a_run_that_is_gone_is_a_difference(self, case: Case) -> None:
        shutil.rmtree(case.host_root)
        there = case.there()
        assert there.status is Status.NOT_OK
        assert "any more" in there.says

    def test_code_of_a_run_that_is_gone_is_not_called_changed(self, case: Case) -> None:
        shutil.rmtree(case.host_root)
        _, code, _ = case.all_there(case.bundle)
        assert (code.status, code.says) == (Status.NOT_CHECKED, "the run is not there")

    def test_more_than_the_mirror_is_a_difference_only_after_the_end(self, case: Case) -> None:
        last = max(case.host_records.glob("*.jsonl"))
        last.write_bytes(last.read_bytes() + b"{}\n")
        there = case.there()
        assert there.status is Status.NOT_OK
        assert "3 bytes after the end" in there.says

    def test_a_run_that_goes_on_is_compared_as_far_as_it_is_mirrored(self, case: Case) -> None:
        last = len(scan(case.folder).sizes) - 1
        path = case.folder.segment(last)
        size = path.stat().st_size
        path.write_bytes(path.read_bytes()[:-100])
        there = case.there()
        assert there.status is Status.OK
        total = sum(scan(case.folder).sizes)
        assert f"the mirror has {total} of {total + 100} bytes" in there.says
        path.unlink()
        assert case.there().status is Status.OK
        assert size > 100


class TestJobAndBundle:
    @pytest.mark.parametrize(
        ("key", "value"), [("params", {"lr": 0.2}), ("module", "other"), ("env", {"A": "1"}), ("new", 1)]
    )
    def test_another_job_is_named_by_its_keys(self, key: str, value: Any) -> None:
        check = check_job({"job": {**JOB, key: value}}, {"job": {**JOB, "env": ["A", "B"]}})
        assert check.status is Status.NOT_OK
        assert f"launched: {key} differ" in check.says

    def test_a_record_without_a_job_is_wrong_and_no_record_is_open(self) -> None:
        assert check_job({}, {"job": JOB}).status is Status.NOT_OK
        assert check_job(None, {"job": JOB}).status is Status.NOT_CHECKED
        assert check_job({"job": JOB}, None).status is Status.NOT_CHECKED

    def test_another_bundle_and_an_edited_manifest_are_found(self, case: Case) -> None:
        first = scan(case.folder).first
        assert first is not None
        assert check_bundle(first, case.bundle.id, case.store).status is Status.OK
        assert check_bundle(first, "0" * 64, case.store).status is Status.NOT_OK
        told = {**first, "bundle": {**first["bundle"], "files": 2}}
        assert check_bundle(told, case.bundle.id, case.store).status is Status.NOT_OK
        path = next((case.store.root / "bundles").iterdir())
        path.chmod(0o600)
        path.write_bytes(path.read_bytes() + b" ")
        assert check_bundle(first, case.bundle.id, case.store).status is Status.NOT_OK
        path.unlink()
        assert check_bundle(first, case.bundle.id, case.store).status is Status.NOT_CHECKED

    def test_changed_files_are_named_and_counted(self) -> None:
        state = BundleState(changed=(), changed_count=0, damaged=(), damaged_count=0, absent_count=1)
        assert [check.status for check in check_code(state)] == [Status.OK, Status.OK]
        state = replace(state, changed=("a.py",), changed_count=5, damaged=("ff",), damaged_count=1)
        code, objects = check_code(state)
        assert (code.status, objects.status) == (Status.NOT_OK, Status.NOT_OK)
        assert "a.py and 4 more" in code.says
        assert {check.status for check in check_code(None)} == {Status.NOT_CHECKED}


def test_nothing_mirrored_is_nothing_proved(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, RUN)
    checks = local_checks(folder, scan(folder), newest_arrived(folder), ObjectStore(tmp_path), "0" * 64)
    assert {check.status for check in checks} == {Status.NOT_CHECKED}


@pytest.mark.parametrize(
    ("statuses", "was_asked", "code"),
    [
        ([Status.OK], True, 0),
        ([Status.OK, Status.NOT_CHECKED], True, 1),
        ([Status.OK, Status.NOT_CHECKED], False, 3),
        ([Status.NOT_OK, Status.NOT_CHECKED], False, 5),
    ],
)
def test_the_exit_code_is_0_only_when_all_is_proved(
    statuses: list[Status], was_asked: bool, code: int
) -> None:
    checks = tuple(Check(name="x", status=status, says="") for status in statuses)
    found = Verification(run_id=RUN, host="box", checks=checks, was_host_asked=was_asked)
    assert found.exit_code == code


def test_the_first_block_that_differs_is_found() -> None:
    mirror = [SegmentDigest(size_bytes=9, blocks=("a", "b")), SegmentDigest(size_bytes=4, blocks=("c",))]
    same = dict(enumerate(mirror))
    more = SegmentDigest(size_bytes=99, blocks=("c",))
    block = digests.BLOCK_BYTES
    cases: list[tuple[dict[int, SegmentDigest], Cursor | None]] = [
        (same, None),
        ({**same, 1: more, 2: more}, None),
        ({**same, 0: SegmentDigest(size_bytes=9, blocks=("a", "x"))}, Cursor(offset=block)),
        ({**same, 0: SegmentDigest(size_bytes=12, blocks=("a", "b"))}, Cursor(offset=9)),
        ({0: mirror[0]}, Cursor(segment=1)),
        ({**same, 0: SegmentDigest(size_bytes=5, blocks=("a",))}, Cursor(offset=block)),
    ]
    for host, expected in cases:
        assert first_difference(mirror, host) == expected


def test_a_byte_in_output_that_is_not_utf_8_belongs_to_its_line(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, RUN)
    folder.make()
    writer = RecordWriter(str(folder.records), RUN, {})
    writer.write_output("main", 7, "stdout", 0, 40, "b64", "/wph")  # \xff \n a
    writer.write_output("main", 7, "stdout", 3, 41, "b64", "CgoKYQ==")
    writer.close()
    data = folder.segment(0).read_bytes()

    def name(text: bytes, within: int) -> str | None:
        return place_at(folder, Cursor(offset=data.index(text) + within)).record

    assert name(b"/wph", 0) == f"{RUN}/main.stdout:41"
    assert name(b"CgoKYQ", 5) == f"{RUN}/main.stdout:45"
