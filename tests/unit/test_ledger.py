"""The ledger with real SQLite files, and with several real processes at once."""

from __future__ import annotations

import os
import signal
import sqlite3
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator import ledger as module
from orchestrator import ledger_file
from orchestrator.errors import OrchError, StorageError, UnknownName
from orchestrator.ledger import MASK, MOST_FOUND, Ledger, RunRow
from orchestrator.ledger_file import MIGRATIONS
from orchestrator.lifecycle import State, is_settled

ROOT = Path(__file__).parents[2]


def a_row(run_id: str = "a1", **changes: Any) -> RunRow:
    row = RunRow(
        run_id=run_id,
        group_id=run_id,
        experiment="oom_probe",
        host="pve-200",
        bundle="b" * 64,
        state=State.CREATED,
        created_t=1764435123.25,
        job={"params": {"anchors": 512}, "devices": ["5"]},
    )
    return replace(row, **changes)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / 'it\'s a "ledger"' / "ledger.db"


@pytest.fixture
def ledger(path: Path) -> Iterator[Ledger]:
    with Ledger.open(path) as opened:
        yield opened


PREAMBLE = """
import sys, time
from pathlib import Path
from orchestrator.errors import OrchError
from orchestrator.ledger import Ledger, RunRow
from orchestrator.lifecycle import State
path = Path(sys.argv[1])
def row(run_id):
    return RunRow(run_id=run_id, group_id="g", experiment="e", host="h", bundle="b", state=State.CREATED,
                  created_t=1.0, job={})
"""


class Processes:
    """Other processes with a ledger of their own; ended with the test, whatever happens."""

    def __init__(self) -> None:
        self._started: list[subprocess.Popen[str]] = []

    def start(self, script: str, *arguments: object) -> subprocess.Popen[str]:
        argv = [sys.executable, "-c", PREAMBLE + script, *map(str, arguments)]
        process = subprocess.Popen(
            argv, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self._started.append(process)
        return process

    def close(self) -> None:
        for process in self._started:
            process.kill()
            process.communicate()


@pytest.fixture
def processes() -> Iterator[Processes]:
    started = Processes()
    yield started
    started.close()


def read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def write_line(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdin is not None
    process.stdin.write(text + "\n")


def test_a_row_comes_back_as_it_was_inserted(ledger: Ledger) -> None:
    row = a_row(
        retry_of="a0", profile="fast", commit_id="c" * 40, dirty=True, pid=7, verdict="ok", exit_code=0
    )
    ledger.insert(row)
    assert ledger.get("a1") == row


def test_rows_survive_closing_and_opening(path: Path) -> None:
    with Ledger.open(path) as first:
        first.insert(a_row())
    with Ledger.open(path) as second:
        assert second.get("a1") == a_row()


def test_values_of_the_environment_are_never_on_the_disk(path: Path) -> None:
    with Ledger.open(path) as opened:
        opened.insert(a_row(job={"env": {"HF_TOKEN": "hf_very_secret"}}))
        assert opened.get("a1").job == {"env": {"HF_TOKEN": MASK}}
        on_disk = b"".join(file.read_bytes() for file in path.parent.iterdir())
    assert b"HF_TOKEN" in on_disk
    assert b"hf_very_secret" not in on_disk


def test_update_changes_only_what_it_names_and_returns_the_row(ledger: Ledger) -> None:
    ledger.insert(a_row())
    changed = ledger.update("a1", state=State.RUNNING, pid=42)
    assert changed == a_row(state=State.RUNNING, pid=42) == ledger.get("a1")


def test_an_end_is_not_overwritten_and_nothing_of_the_refused_update_stays(ledger: Ledger) -> None:
    ledger.insert(a_row(state=State.SUCCEEDED, exit_code=0))
    with pytest.raises(OrchError, match="cannot become lost"):
        ledger.update("a1", state=State.LOST, exit_code=9)
    assert ledger.get("a1").exit_code == 0
    assert ledger.update("a1", state=State.SUCCEEDED, verdict="ok").verdict == "ok"


def test_only_columns_that_change_can_be_updated(ledger: Ledger) -> None:
    ledger.insert(a_row())
    with pytest.raises(AssertionError, match="bundle"):
        ledger.update("a1", bundle="other")  # type: ignore[call-arg]  # what mypy refuses, at run time


@pytest.mark.parametrize("run_id", ["", "a", "a1 ", "\udcff", "'; DROP TABLE runs; --"])
def test_an_unknown_run_is_named(ledger: Ledger, run_id: str) -> None:
    ledger.insert(a_row())
    for call in (ledger.get, ledger.update):
        with pytest.raises(UnknownName, match="orch ps"):
            call(run_id)
    assert ledger.get("a1")


def test_a_run_id_is_inserted_once(ledger: Ledger) -> None:
    ledger.insert(a_row())
    with pytest.raises(StorageError, match="holds that run already"):
        ledger.insert(a_row(host="other"))
    assert ledger.get("a1").host == "pve-200"


def test_a_reason_that_is_no_valid_text_is_kept_escaped(ledger: Ledger) -> None:
    ledger.insert(a_row())
    assert ledger.update("a1", reason="bad \udcff byte").reason == "bad \\udcff byte"


def test_recent_is_the_order_of_insertion_whatever_the_clock_said(ledger: Ledger) -> None:
    for number, created_t in enumerate([300.0, 200.0, 100.0]):
        ledger.insert(a_row(f"r{number}", created_t=created_t, host=f"host{number % 2}"))
    assert [row.run_id for row in ledger.recent(2)] == ["r2", "r1"]
    assert [row.run_id for row in ledger.recent(9, host="host0")] == ["r2", "r0"]
    last = ledger.last()
    assert last is not None
    assert last.run_id == "r2"


def test_an_empty_ledger_has_no_last_run(ledger: Ledger) -> None:
    assert ledger.last() is None
    assert ledger.recent(5) == []
    assert ledger.find("a") == []
    assert ledger.find("\udcff") == []  # an argument that is not UTF-8


@given(
    st.sets(st.text(alphabet="ab%_*é\U0010fffe", min_size=1, max_size=4), max_size=12),
    st.text("ab%_*é\U0010fffe"),
)
def test_find_means_the_literal_prefix(run_ids: set[str], prefix: str) -> None:
    with tempfile.TemporaryDirectory() as folder, Ledger.open(Path(folder) / "ledger.db") as opened:
        opened._connection.execute(
            "PRAGMA synchronous = OFF"
        )  # hundreds of ledgers: no disk need hear of them
        for run_id in run_ids:
            opened.insert(a_row(run_id))
        assert set(opened.find(prefix)) == {run_id for run_id in run_ids if run_id.startswith(prefix)}


def test_find_is_bounded_and_shows_an_exact_match_first(ledger: Ledger) -> None:
    for number in range(MOST_FOUND * 2):
        ledger.insert(a_row(f"a1{number:03}"))
    ledger.insert(a_row("a1"))
    assert len(ledger.find("a1")) == MOST_FOUND
    assert ledger.find("a1")[0] == "a1"


def test_lookups_among_many_rows_use_an_index_and_sort_nothing(ledger: Ledger) -> None:
    template = {name: module._stored(name, getattr(a_row(), name)) for name in module._COLUMNS}
    values = ([*(template | {"run_id": f"r{n:06}", "host": f"h{n % 5}"}).values()] for n in range(100_000))
    with ledger._transaction():
        ledger._connection.executemany(module._INSERT, values)
    assert len(ledger.recent(50)) == 50
    assert ledger.find("r09999") == [f"r09999{digit}" for digit in range(10)]
    for query, arguments in (
        (module._GET, ("r1",)),
        (module._FIND, ("r", "s", 20)),
        (module._RECENT, (50,)),
        (module._RECENT_ON_HOST, ("h1", 50)),
        (module._OF_GROUP, ("a1",)),
        (module._FIND_GROUPS, ("r", "s", 20)),
        (module._AHEAD, ("r000001",)),
    ):
        plan = " ".join(
            row[3] for row in ledger._connection.execute(f"EXPLAIN QUERY PLAN {query}", arguments)
        )
        assert "TEMP B-TREE" not in plan
        assert "INDEX" in plan or query is module._RECENT  # which walks the table itself from its end


def test_open_runs_are_found_without_a_look_at_the_others(ledger: Ledger) -> None:
    ended = (a_row(f"ended{number}", state=State.SUCCEEDED) for number in range(50))
    ledger.insert(*ended, a_row("b", state=State.LOST), a_row("a", state=State.QUEUED, host="there"))
    assert [row.run_id for row in ledger.open_runs()] == ["b", "a"]
    assert [row.run_id for row in ledger.open_runs("there")] == ["a"]
    plan = " ".join(row[3] for row in ledger._connection.execute(f"EXPLAIN QUERY PLAN {module._OPEN}"))
    assert "runs_open" in plan
    assert "TEMP B-TREE" not in plan


def test_the_open_runs_are_those_that_lifecycle_calls_open(ledger: Ledger) -> None:
    ledger.insert(*(a_row(str(state), state=state) for state in State))
    assert {row.state for row in ledger.open_runs()} == {state for state in State if not is_settled(state)}


def test_an_adopted_run_is_entered_once_and_is_never_the_last(ledger: Ledger) -> None:
    ledger.insert(a_row("mine"))
    theirs = a_row("theirs", is_adopted=True, job={"env": {"TOKEN": "hf_secret"}})
    assert ledger.adopt([theirs, a_row("mine", experiment="another")]) == ["theirs"]
    assert ledger.adopt([theirs]) == []
    assert ledger.get("mine").experiment == "oom_probe"
    assert ledger.get("theirs") == replace(theirs, job={"env": {"TOKEN": MASK}})
    last = ledger.last()
    assert last is not None
    assert last.run_id == "mine"


def test_a_host_is_unreachable_since_the_first_time_until_it_answers(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([100.0, 200.0, 300.0])
    monkeypatch.setattr("orchestrator.ledger.time.time", lambda: next(clock))
    assert [ledger.note_unreachable("h"), ledger.note_unreachable("h")] == [100.0, 100.0]
    ledger.note_reachable("h")
    assert ledger.note_unreachable("h") == 300.0


def test_the_file_and_its_companions_are_for_their_owner_only(path: Path) -> None:
    before = os.umask(0)
    try:
        with Ledger.open(path) as opened:
            opened.insert(a_row())
            modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in path.parent.iterdir()}
            assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    finally:
        os.umask(before)
    assert modes == dict.fromkeys(("ledger.db", "ledger.db-wal", "ledger.db-shm", "ledger.db.use"), 0o600)


WRITER = """
name, count = sys.argv[2], int(sys.argv[3])
with Ledger.open(path) as ledger:
    for number in range(count):
        ledger.insert(row(f"{name}-{number:03}"))
        ledger.update(f"{name}-{number:03}", state=State.RUNNING)
        ledger.update("shared", pid=number)
        ledger.update(f"{name}-{number:03}", state=State.SUCCEEDED, exit_code=0)
"""


def test_processes_that_write_at_once_lose_nothing(path: Path, processes: Processes) -> None:
    with Ledger.open(path) as opened:
        opened.insert(a_row("shared"))
        writers = [processes.start(WRITER, path, f"w{number}", 25) for number in range(4)]
        assert [writer.wait(60) for writer in writers] == [0] * 4
        rows = [row for row in opened.recent(1000) if row.run_id != "shared"]
    assert {(row.state, row.exit_code) for row in rows} == {(State.SUCCEEDED, 0)}
    for number in range(4):
        in_order = [row.run_id for row in reversed(rows) if row.run_id.startswith(f"w{number}")]
        assert in_order == [f"w{number}-{position:03}" for position in range(25)]


RACER = """
with Ledger.open(path) as ledger:
    print("ready", flush=True)
    sys.stdin.readline()
    try:
        ledger.update("a1", state=State(sys.argv[2]))
        print("won")
    except OrchError:
        print("late")
"""


def test_of_different_ends_at_once_the_first_stands(path: Path, processes: Processes) -> None:
    states = ["succeeded", "failed", "cancelled"]
    with Ledger.open(path) as opened:
        opened.insert(a_row(state=State.RUNNING))
        racers = [processes.start(RACER, path, state) for state in states]
        assert [read_line(racer) for racer in racers] == ["ready"] * 3
        for racer in racers:
            write_line(racer, "go")
        said = [read_line(racer) for racer in racers]
        assert sorted(said) == ["late", "late", "won"]
        assert opened.get("a1").state == states[said.index("won")]


OPENER = """
sys.stdin.readline()
for number in range(150):
    Ledger.open(path / f"{number}.db").close()
with Ledger.open(path / "0.db") as ledger:
    ledger.insert(row(sys.argv[2]))
"""


def test_a_new_ledger_can_be_made_by_several_processes_at_once(tmp_path: Path, processes: Processes) -> None:
    openers = [processes.start(OPENER, tmp_path, f"p{number}") for number in range(4)]
    for opener in openers:
        write_line(opener, "go")
    assert [opener.wait(60) for opener in openers] == [0] * 4
    with Ledger.open(tmp_path / "0.db") as opened:
        assert {row.run_id for row in opened.recent(9)} == {"p0", "p1", "p2", "p3"}


KILLED = """
ledger = Ledger.open(path)
ledger.insert(row("before"))
ledger._connection.execute("PRAGMA cache_size = 1")  # pages of the open transaction reach the disk
with ledger._transaction():
    ledger._connection.execute("UPDATE runs SET reason = 'half'")
    for number in range(2000):
        ledger._connection.execute(
            "INSERT INTO runs (run_id, group_id, experiment, host, bundle, dirty, state, created_t, job) "
            "VALUES (?, 'g', 'e', 'h', 'b', 0, 'created', 1, '{}')", [f"half{number}"])
    print("ready", flush=True)
    time.sleep(60)
"""


def test_a_writer_killed_in_mid_transaction_leaves_what_was_before(path: Path, processes: Processes) -> None:
    writer = processes.start(KILLED, path)
    assert read_line(writer) == "ready"
    assert path.with_name("ledger.db-wal").stat().st_size > 100_000
    writer.send_signal(signal.SIGKILL)
    writer.wait(60)
    with Ledger.open(path) as opened:
        assert [(row.run_id, row.reason) for row in opened.recent(9)] == [("before", None)]
        opened.insert(a_row("after"))
        assert opened._connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_a_lock_that_stays_is_reported(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_file, "BUSY_TIMEOUT_S", 0.05)
    with Ledger.open(path) as holder, Ledger.open(path) as other:
        with holder._transaction(), pytest.raises(StorageError, match=r"locked.*try again"):
            other.insert(a_row())
        other.insert(a_row())


def test_a_file_that_is_no_database_is_refused_and_left_alone(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"not a database at all" * 100)
    with pytest.raises(
        StorageError, match=r"not a ledger, or damaged; `orch ledger rebuild` makes a new one"
    ):
        Ledger.open(path)
    assert path.read_bytes() == b"not a database at all" * 100


def test_another_programs_database_is_refused_and_left_alone(path: Path) -> None:
    path.parent.mkdir()
    foreign = sqlite3.connect(path)
    foreign.execute("CREATE TABLE runs (id)")
    foreign.close()
    content = path.read_bytes()
    with pytest.raises(StorageError, match="belongs to another program"):
        Ledger.open(path)
    assert path.read_bytes() == content


def test_a_newer_schema_is_refused(path: Path) -> None:
    with Ledger.open(path) as opened:
        opened._connection.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 1}")
    with pytest.raises(StorageError, match=r"newer orch.*update this one"):
        Ledger.open(path)


def test_a_damaged_ledger_is_reported(path: Path) -> None:
    with Ledger.open(path) as opened:
        for number in range(200):
            opened.insert(a_row(f"a{number}"))
    content = bytearray(path.read_bytes())
    content[4096:] = b"\xa5" * (len(content) - 4096)
    path.write_bytes(content)
    with pytest.raises(StorageError, match="orch ledger rebuild"), Ledger.open(path) as opened:
        opened.recent(9)


@pytest.mark.parametrize("change", ["state = 'levitating'", "job = '{'"])
def test_a_row_that_cannot_be_understood_is_named(ledger: Ledger, change: str) -> None:
    ledger.insert(a_row())
    ledger._connection.execute(f"UPDATE runs SET {change}")  # noqa: S608  (the parameters above)
    with pytest.raises(StorageError, match=r"row of run 'a1' cannot be read"):
        ledger.last()


def test_an_older_ledger_is_migrated_step_by_step(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Ledger.open(path) as opened:
        opened.insert(a_row())
    steps = (*MIGRATIONS, ("ALTER TABLE runs ADD COLUMN extra TEXT",), ("UPDATE runs SET extra = 'new'",))
    monkeypatch.setattr(ledger_file, "MIGRATIONS", steps)
    with Ledger.open(path) as opened:
        assert opened.get("a1") == a_row()
        assert opened._connection.execute("SELECT extra FROM runs").fetchall() == [("new",)]
        assert opened._connection.execute("PRAGMA user_version").fetchone() == (len(steps),)


def test_a_migration_that_fails_changes_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Ledger.open(path) as opened:
        opened.insert(a_row())
    with monkeypatch.context() as patch:
        patch.setattr(
            ledger_file, "MIGRATIONS", (*MIGRATIONS, ("ALTER TABLE runs ADD COLUMN extra", "NONSENSE"))
        )
        with pytest.raises(StorageError, match="NONSENSE"):
            Ledger.open(path)
    with Ledger.open(path) as opened:
        assert opened.get("a1") == a_row()
        assert "extra" not in {row[1] for row in opened._connection.execute("PRAGMA table_info(runs)")}


def test_a_folder_that_cannot_be_made_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="check the folder"):
        Ledger.open(tmp_path / "file" / "ledger.db")


def test_a_folder_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o500)
    was_root = os.geteuid() == 0
    if was_root:
        os.seteuid(65534)
    try:
        with pytest.raises(StorageError, match=r"ermission denied.*owner and mode"):
            Ledger.open(folder / "ledger.db")
    finally:
        if was_root:
            os.seteuid(0)


def test_a_full_disk_is_reported_and_the_row_is_not_there(ledger: Ledger) -> None:
    pages = ledger._connection.execute("PRAGMA page_count").fetchone()[0]
    ledger._connection.execute(f"PRAGMA max_page_count = {pages}")  # SQLite's own way to be out of space
    with pytest.raises(StorageError, match="make room"):
        ledger.insert(a_row(job={"params": "x" * 100_000}))
    assert ledger.last() is None
