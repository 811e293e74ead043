"""`orch verify` of a run whose log limit cut segments: what went, here or there, is named and not blamed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orchestrator.checks import Check, Status
from orchestrator.conversation import Cursor, Cut, Piece
from orchestrator.holes import stub_path
from orchestrator.mirror import Mirror
from orchestrator.mirror_scan import scan
from orchestrator.supervisor.cuts import SLACK_BYTES, stub_indexes, stub_name
from orchestrator.supervisor.records import RecordWriter
from orchestrator.supervisor.rundir import RunDir
from orchestrator.supervisor.tail import Tail
from tests.unit.test_verification import Case, wrong

SEGMENT = 3000


class LimitedCase(Case):
    """That run with a limit, mirrored when it began and when it had ended, or all the time."""

    is_followed = False

    def write(self, run_id: str, word: str = "line", segment_bytes: int = SEGMENT) -> Path:
        folder = Path(RunDir(str(self.host_root), run_id).records)
        self.host_root.mkdir(mode=0o700, exist_ok=True)
        folder.mkdir(parents=True)
        self.host_records = folder
        header = {"job": {**self.job, "run_id": run_id}, "bundle": {"id": self.bundle.id, "files": 1}}
        header["bundle"]["bytes"] = self.bundle.size_bytes
        limit = 6 * segment_bytes + SLACK_BYTES
        clock = iter(range(10**6))
        writer = RecordWriter(
            str(folder), run_id, header, lambda: float(next(clock)), segment_bytes, limit_bytes=limit
        )
        for i in range(400):
            writer.write_output("main", 7, "stderr", 14 * i, 2 * i, "text", f"{word} {i:02}\nthen\n")
            if i < 70 or self.is_followed:
                self.mirror()
        writer.write("end", outcome="exited", code=0)
        writer.close()
        return folder

    def mirror(self) -> None:
        mirror = Mirror.acquire(self.folder, "box")
        assert mirror is not None
        with mirror:
            Tail(
                str(self.host_records),
                mirror.cursor.segment,
                mirror.cursor.offset,
                lambda segment, offset, data: mirror.append(
                    Piece(Cursor(segment=segment, offset=offset), data)
                ),
                lambda segment, offset, through, stub: mirror.append(
                    Cut(cursor=Cursor(segment=segment, offset=offset), through=through, stub=stub)
                ),
            ).pump()


class FollowedCase(LimitedCase):
    is_followed = True


@pytest.fixture(autouse=True)
def _quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda _: None)


@pytest.fixture
def case(tmp_path: Path) -> LimitedCase:
    return LimitedCase(tmp_path)


@pytest.fixture
def followed(tmp_path: Path) -> FollowedCase:
    return FollowedCase(tmp_path)


def proved(case: Case) -> dict[str, Check]:
    checks = {**case.here(), "host's records": case.there()}
    assert {check.status for check in checks.values()} == {Status.OK}, checks
    return checks


def test_what_is_cut_is_named_and_all_else_is_proved(case: LimitedCase) -> None:
    checks = proved(case)
    (hole,) = scan(case.folder).holes
    records = f"records {hole.first} to {hole.last}"
    says = f"cut by the run's log limit: {hole.size_bytes} bytes, {records}, after byte"
    assert says in checks["segments"].says
    assert f"to the end of segment {hole.through}" in checks["segments"].says
    assert f"without a gap but for {hole.last - hole.first + 1} records" in checks["numbers"].says
    assert "bytes more are here that its log limit has cut there" in checks["host's records"].says


def test_a_mirror_that_has_more_than_its_host_is_the_hosts(followed: FollowedCase) -> None:
    checks = proved(followed)
    here, there = scan(followed.folder), sorted(followed.host_records.glob("*.jsonl"))
    assert not here.holes
    assert len(there) < len(here.sizes)
    more = sum(here.sizes) - sum(path.stat().st_size for path in there)
    assert f"; {more} bytes more are here" in checks["host's records"].says


class TestTheHost:
    def test_a_segment_that_goes_without_a_stub_is_missed(self, followed: FollowedCase) -> None:
        (index,) = stub_indexes(str(followed.host_records))
        (followed.host_records / stub_name(index)).unlink()
        there = followed.there()
        assert there.status is Status.NOT_OK
        assert "the host lacks segment 1" in there.says

    def test_a_stub_is_no_excuse_for_what_no_record_says_was_cut(self, followed: FollowedCase) -> None:
        last = len(scan(followed.folder).sizes) - 2
        path = followed.host_records / f"{last:06}.jsonl"
        line = path.read_bytes().splitlines(keepends=True)[-1]
        (followed.host_records / stub_name(last)).write_bytes(line)
        path.unlink()
        there = followed.there()
        assert there.status is Status.NOT_OK
        assert f"cut segment {last}, and no record here tells of it" in there.says

    def test_a_forged_stub_is_found(self, followed: FollowedCase) -> None:
        (index,) = stub_indexes(str(followed.host_records))
        path = followed.host_records / stub_name(index)
        stub = json.loads(path.read_bytes())
        path.write_bytes(path.read_bytes().replace(stub["sha256"].encode(), b"0" * 64))
        there = followed.there()
        assert there.status is Status.NOT_OK
        assert f"stub of segment {index}" in there.says

    def test_what_is_left_there_is_compared_byte_by_byte(self, followed: FollowedCase) -> None:
        path = min(followed.host_records.glob("0000[1-9]*.jsonl"))
        at = followed.change(path, b"then", b"Then")
        place = followed.there().place
        assert place is not None
        assert (place.segment, place.offset) == (int(path.stem), at)

    def test_what_it_has_cut_since_is_open_until_its_record_is_here(self, case: LimitedCase) -> None:
        last = len(scan(case.folder).sizes)
        for index in range(6, last):
            case.folder.segment(index).unlink(missing_ok=True)
        for index in stub_indexes(str(case.folder.records)):
            stub_path(case.folder, index).unlink()
        assert not scan(case.folder).has_ended
        there = case.there()
        assert there.status is Status.NOT_CHECKED
        assert "no record here tells of it" in there.says


def test_a_segment_that_is_taken_out_of_the_mirror_is_missed(followed: FollowedCase) -> None:
    followed.folder.segment(3).unlink()
    assert wrong(followed.here()) >= {"numbers", "segments", "seals", "pinned seals"}


def test_a_stub_in_the_place_of_what_was_here_does_not_fit_the_pins(followed: FollowedCase) -> None:
    """The host did cut it, and the seal is right: but it was here."""
    path = followed.folder.segment(3)
    stub_path(followed.folder, 3).write_bytes(path.read_bytes().splitlines(keepends=True)[-1])
    path.unlink()
    assert wrong(followed.here()) == {"pinned seals"}
