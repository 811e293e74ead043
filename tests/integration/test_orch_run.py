"""From the command line to a verdict, on this machine and over a real sshd, also when cut off on the way."""

from __future__ import annotations

import json
import os
import pty
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.project import Project, wait_until

HELLO = """
import json, sys
params = json.load(open(sys.argv[sys.argv.index("--params") + 1]))
print("hello", params)
print("warning", file=sys.stderr)
"""
SLOW = """
import os, time
for i in range(60):
    while i == 30 and not os.path.exists(os.environ["GATE"]):
        time.sleep(0.01)
    print("tick", i, flush=True)
    time.sleep(0.02)
"""
SLEEPER = """
import os, subprocess, time
subprocess.Popen(["sleep", "100"], start_new_session=True)
os.write(1, b"up\\n")  # in one piece: its other end may be about to go
time.sleep(100)
"""
TICKS = "".join(f"tick {i}\n" for i in range(60))


@pytest.fixture(params=["local", "ssh"])
def any_project(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Project]:
    """A project whose host ``here`` is this machine, directly or over ssh."""
    entry: dict[str, Any] = {"transport": "local"}
    if request.param == "ssh":
        entry = request.getfixturevalue("sshd").inventory_entry()
    project = Project(tmp_path / "my project", {"here": entry})
    yield project
    project.end_all()


class TestAWholeRun:
    def test_it_ends_with_a_verdict_and_a_mirror_equal_to_the_host(self, any_project: Project) -> None:
        path = any_project.experiment(HELLO, params={"size": 3, "text": "a 'b' $(id) `id` \n;"})
        done = any_project.orch("run", path, "--host", "here", "--json")
        assert done.code == 0, done.err
        report = done.json
        run_id = report["run"]["run_id"]
        assert report["verdict"]["name"] == "ok"
        assert report["run"]["state"] == "succeeded"
        assert report["run"]["bundle"]
        assert any_project.output(run_id) == f"hello {report['run']['job']['params']}\n"
        assert any_project.output(run_id, "stderr") == "warning\n"
        assert any_project.mirrored(run_id) == any_project.written(run_id) != b""
        assert any_project.observations(run_id, "seal")

    def test_a_second_run_of_an_unchanged_payload_ships_no_file(self, any_project: Project) -> None:
        path = any_project.experiment(HELLO)
        first = any_project.orch("run", path, "--host", "here")
        again = any_project.orch("run", path, "--host", "here")
        assert "sent 2 files" in first.err
        assert "no file sent" in again.err
        any_project.experiment(HELLO + "\n# changed\n")
        assert "sent 1 file," in any_project.orch("run", path, "--host", "here").err

    def test_every_line_says_which_host_run_process_and_stream_it_came_from(
        self, any_project: Project
    ) -> None:
        done = any_project.orch("run", any_project.experiment(HELLO), "--host", "here")
        run_id = any_project.runs()[0]["run_id"]
        assert f"here {run_id[:8]}/main.stdout:1 | hello {{}}" in done.out
        assert f"here {run_id[:8]}/main.stderr:1 | warning" in done.out
        for label in ("bundle", "commit", "devices", "allocator", "verdict", "software"):
            assert f"\n{label}" in done.out

    def test_the_exit_code_is_the_verdict(self, project: Project) -> None:
        bad = project.experiment("raise SystemExit(9)", name="bad")
        assert project.orch("run", bad, "--host", "here").code == 1
        oom = "class OutOfMemoryError(Exception): pass\nraise OutOfMemoryError('Tried to allocate 15.09 GiB')"
        expected = project.experiment(oom, name="oom", expect={"verdict": "oom"})
        done = project.orch("run", expected, "--host", "here", "--json")
        assert (done.code, done.json["verdict"]["name"]) == (0, "oom")
        killed = project.experiment("import os; os.kill(os.getpid(), 9)", name="killed")
        done = project.orch("run", killed, "--host", "here", "--json")
        assert (done.code, done.json["verdict"]["name"], done.json["run"]["signal"]) == (1, "killed", 9)

    def test_metrics_are_judged_by_their_bounds(self, project: Project) -> None:
        code = """
            import json, os
            fd = int(os.environ["ORCH_EVENTS_FD"].split(":")[0])
            os.write(fd, b'{"kind":"metric","name":"loss","value":2.5}\\n')
            """
        good = project.experiment(code, name="good", expect={"metrics": {"loss": {"max": 3}}})
        done = project.orch("run", good, "--host", "here", "--json")
        assert (done.code, done.json["outcome"]["metrics"]) == (0, {"loss": 2.5})
        bad = project.experiment(code, name="bad", expect={"metrics": {"loss": {"max": 2}}})
        done = project.orch("run", bad, "--host", "here", "--json")
        assert (done.code, done.json["verdict"]["name"]) == (1, "out_of_bounds")

    def test_profile_and_set_change_what_runs(self, project: Project) -> None:
        path = project.experiment(
            """
            import os, sys, json
            params = json.load(open(sys.argv[-1]))
            print(os.environ["MODE"], json.dumps(params, sort_keys=True))
            """,
            params={"lr": 1.0, "deep": {"er": 1}},
            env={"MODE": "base"},
            profiles={"small": {"params": {"lr": 0.5}, "env": {"MODE": "small"}}},
        )
        project.orch("run", path, "--host", "here", "--profile", "small", "--set", "deep.er=[1, two]")
        assert (
            project.output(project.runs()[0]["run_id"]) == 'small {"deep": {"er": [1, "two"]}, "lr": 0.5}\n'
        )

    def test_dry_run_shows_the_job_and_starts_nothing(self, project: Project) -> None:
        path = project.experiment(HELLO, params={"a": 1})
        done = project.orch("run", path, "--host", "here", "--dry-run", "--json")
        assert (done.code, done.json["job"]["params"]) == (0, {"a": 1})
        done = project.orch("run", path, "--host", "here", "--dry-run")
        assert "probe.trial" in done.out
        assert '{"a": 1}' in done.out
        assert not project.host_root.exists()
        assert project.runs() == []

    def test_everything_written_is_private(self, any_project: Project) -> None:
        any_project.orch("run", any_project.experiment(HELLO), "--host", "here")
        for root in (any_project.folder / ".orch", any_project.host_root):
            for path in (root, *root.rglob("*")):
                assert stat.S_IMODE(path.lstat().st_mode) & 0o077 == 0, path

    def test_the_commit_and_a_dirty_tree_are_recorded(self, project: Project) -> None:
        path = project.experiment(HELLO)
        for command in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "x"]):
            subprocess.run(["git", *command], cwd=project.folder, check=True)
        project.orch("run", path, "--host", "here")
        project.experiment(HELLO + "\n# changed\n")
        project.orch("run", path, "--host", "here")
        dirty, clean = project.runs()
        head = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=project.folder, text=True).strip()
        assert (clean["commit_id"], clean["dirty"], dirty["dirty"]) == (head, False, True)
        assert dirty["job"]["provenance"]["diff_sha256"]


class TestLeavingAndComingBack:
    def test_ctrl_c_leaves_the_view_and_not_the_run(self, any_project: Project) -> None:
        process = any_project.start("run", _slow(any_project), "--host", "here")
        assert process.stdout is not None
        while b"tick 3" not in process.stdout.readline():
            pass
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
        run_id = any_project.runs()[0]["run_id"]
        assert process.returncode == 130
        assert f"orch logs -f {run_id}" in err.decode()
        _go_on(any_project)
        done = any_project.orch("wait", run_id[:6])
        assert done.code == 0, done.err
        assert any_project.output(run_id) == TICKS
        assert any_project.mirrored(run_id) == any_project.written(run_id)

    def test_sigterm_leaves_the_view_and_not_the_run(self, project: Project) -> None:
        process = project.start("run", _slow(project), "--host", "here")
        assert process.stdout is not None
        process.stdout.readline()
        process.terminate()
        _, err = process.communicate(timeout=30)
        assert process.returncode == 143
        assert b"nothing was done to run" in err
        _go_on(project)
        assert project.orch("wait", "last").code == 0

    def test_a_closed_pipe_ends_the_view_and_not_the_run(self, project: Project) -> None:
        process = project.start("run", _slow(project), "--host", "here")
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        _go_on(project)
        err = process.stderr.read()
        process.stderr.close()
        assert process.wait(30) == 141
        assert b"nothing was done to run" in err
        assert b"Traceback" not in err
        assert project.orch("wait", "last").code == 0
        assert project.output(project.runs()[0]["run_id"]) == TICKS

    def test_a_second_ctrl_c_cancels_the_run(self, project: Project) -> None:
        controller, terminal = pty.openpty()
        process = project.start("run", project.experiment(SLEEPER), "--host", "here", stderr=terminal)
        os.close(terminal)
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        seen = b""
        while b"again within" not in seen:
            seen += os.read(controller, 4096)
        process.send_signal(signal.SIGINT)
        drain = threading.Thread(target=_read_all, args=(controller,), daemon=True)
        drain.start()
        process.communicate(timeout=30)
        drain.join(5)
        os.close(controller)
        row = project.runs()[0]
        assert (process.returncode, row["state"]) == (130, "cancelled")
        assert project.output(row["run_id"]) == "up\n"

    def test_a_killed_controller_costs_nothing(self, any_project: Project) -> None:
        process = any_project.start("run", _slow(any_project), "--host", "here")
        assert process.stdout is not None
        while b"tick 5" not in process.stdout.readline():
            pass
        process.kill()
        process.communicate(timeout=30)
        run_id = any_project.runs()[0]["run_id"]
        _go_on(any_project)
        done = any_project.orch("logs", "-f", run_id)
        assert done.code == 0
        assert done.out.count("tick 59") == 1
        assert any_project.output(run_id) == TICKS
        assert any_project.mirrored(run_id) == any_project.written(run_id)

    def test_a_cut_connection_is_made_again_without_loss_or_doubles(
        self, start_sshd: Any, tmp_path: Path
    ) -> None:
        sshd = start_sshd()
        project = Project(tmp_path / "my project", {"here": sshd.inventory_entry()})
        process = project.start("run", _slow(project), "--host", "here")
        assert process.stdout is not None
        for mark in (b"tick 5", b"tick 20"):
            while mark not in (line := process.stdout.readline()):
                assert line, "the command ended"
            sshd.kill_sessions()
        sshd.restart()
        _go_on(project)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        assert b"answers again" in err
        run_id = project.runs()[0]["run_id"]
        assert project.output(run_id) == TICKS
        assert project.mirrored(run_id) == project.written(run_id)
        assert out.count(b"tick 59") == 1

    def test_many_viewers_share_one_mirror(self, project: Project) -> None:
        project.orch("run", _slow(project), "--host", "here", "--detach")
        viewers = [project.start("logs", "-f", "last") for _ in range(4)]
        firsts = [_first_line(viewer) for viewer in viewers]
        _go_on(project)
        outs = [first + _rest(viewer)[0] for first, viewer in zip(firsts, viewers, strict=True)]
        assert len(set(outs)) == 1
        assert outs[0].count(b"tick") == 60
        run_id = project.runs()[0]["run_id"]
        assert project.mirrored(run_id) == project.written(run_id)

    def test_detach_prints_the_id_and_wait_gives_the_verdict(self, any_project: Project) -> None:
        done = any_project.orch(
            "run", any_project.experiment("raise SystemExit(3)"), "--host", "here", "--detach"
        )
        assert done.code == 0
        assert any_project.orch("wait", done.out.strip()).code == 1
        assert any_project.runs()[0]["exit_code"] == 3

    def test_cancel_ends_everything_and_says_so(self, any_project: Project) -> None:
        code = """
            import subprocess, sys, time
            subprocess.Popen(["sleep", "100"], start_new_session=True)
            print("up", flush=True)
            time.sleep(100)
            """
        done = any_project.orch("run", any_project.experiment(code), "--host", "here", "--detach")
        wait_until(lambda: "up" in any_project.orch("logs", "last").out, "the payload")
        done = any_project.orch("cancel", "last", "--grace", "1s")
        assert done.code == 0, done.err
        assert any_project.runs()[0]["state"] == "cancelled"
        assert any_project.orch("cancel", "last").code == 0


class TestWhatOtherCommandsSayMeanwhile:
    def test_a_killed_supervisor_is_told_and_cancel_ends_what_it_left(self, any_project: Project) -> None:
        any_project.orch("run", any_project.experiment(SLEEPER), "--host", "here", "--detach")
        run_id = any_project.runs()[0]["run_id"]
        wait_until(lambda: "up" in any_project.orch("logs", run_id).out, "the payload")
        state = json.loads((any_project.host_root / "runs" / run_id / "state.json").read_text())
        os.kill(state["identity"]["pid"], signal.SIGKILL)
        wait_until(lambda: any_project.runs()[0]["state"] == "lost", "the loss to be noticed")
        shown = any_project.orch("show", run_id).out
        assert "its supervisor is gone" in shown
        assert "orch cancel" in shown
        done = any_project.orch("cancel", run_id, "--grace", "1")
        assert done.code == 0, done.err
        assert done.err.count("ended, though its supervisor was gone") == 2
        done = any_project.orch("cancel", run_id)
        assert "nothing of run" in done.err

    def test_an_ended_run_needs_no_host(self, start_sshd: Any, tmp_path: Path) -> None:
        sshd = start_sshd()
        project = Project(tmp_path / "p", {"here": sshd.inventory_entry()})
        project.orch("run", project.experiment(HELLO), "--host", "here")
        sshd.stop()
        project.write_inventory({"there": {"transport": "local"}})
        for command in (["wait", "last"], ["logs", "-f", "last"], ["cancel", "last"], ["show", "last"]):
            done = project.orch(*command)
            assert done.code == 0, (command, done.err)

    def test_a_stopped_controller_makes_no_run_lost(self, project: Project) -> None:
        process = project.start("run", _slow(project), "--host", "here")
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGSTOP)
        _go_on(project)
        run_id = json.loads(project.orch("ps", "--json").out)[0]["run_id"]
        state = project.host_root / "runs" / run_id / "state.json"
        wait_until(lambda: json.loads(state.read_text())["state"] == "ended", "the run's end")
        assert project.runs()[0]["state"] == "running"
        assert project.orch("logs", run_id).code == 0
        done = project.orch("cancel", run_id)
        assert done.code == 0, done.err
        assert "another orch process is mirroring it" in done.err
        process.send_signal(signal.SIGCONT)
        process.communicate(timeout=30)
        assert process.returncode == 0
        assert project.runs()[0]["verdict"] == "ok"

    def test_a_run_being_started_is_left_alone_and_a_cancel_is_kept(self, project: Project) -> None:
        slow_python = project.folder / "slow python"
        gate = project.folder / "gate"
        slow_python.write_text(
            f"#!/bin/sh\nwhile [ ! -e '{gate}' ]; do sleep 0.05; done\nexec '{sys.executable}' \"$@\"\n"
        )
        slow_python.chmod(0o700)
        project.write_inventory({"here": {"transport": "local", "python": str(slow_python)}})
        process = project.start("run", project.experiment(SLEEPER), "--host", "here")
        wait_until(lambda: bool(project.runs()), "the row")
        assert project.runs()[0]["state"] == "starting"
        assert project.orch("show", "last").code == 0
        canceller = project.start("cancel", "last", "--grace", "3")
        wait_until(lambda: bool(list(project.folder.glob(".orch/runs/*/cancel"))), "the cancel")
        gate.touch()
        process.communicate(timeout=60)
        canceller.communicate(timeout=60)
        assert canceller.returncode == 0
        row = project.runs()[0]
        assert (row["state"], row["verdict"]) == ("cancelled", "cancelled")
        stopping = [record for record in project.records(row["run_id"]) if record["kind"] == "stopping"]
        assert [record["grace_s"] for record in stopping] == [3.0]

    def test_ctrl_c_while_starting_does_not_say_that_the_run_goes_on(self, project: Project) -> None:
        stuck = project.folder / "stuck"
        stuck.write_text("#!/bin/sh\nexec sleep 60\n")
        stuck.chmod(0o700)
        project.write_inventory({"here": {"transport": "local", "python": str(stuck)}})
        process = project.start("run", project.experiment(HELLO), "--host", "here")
        wait_until(lambda: bool(list(project.folder.glob(".orch/runs/*/start.lock"))), "the start")
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
        assert b"being started" in err
        assert b"goes on" not in err

    def test_an_altered_mirror_is_never_shown_as_truth(self, project: Project) -> None:
        project.orch("run", project.experiment("print('hi')\nraise SystemExit(3)"), "--host", "here")
        run_id = project.runs()[0]["run_id"]
        path = project.folder / ".orch" / "runs" / run_id / "records" / "000000.jsonl"
        path.write_bytes(path.read_bytes().replace(b'"code":3', b'"code":0'))
        shown = project.orch("show", run_id).out
        assert "altered" in shown
        assert "ok" not in shown.split("verdict")[1]
        assert project.orch("wait", run_id).code == 5
        for more in ([], ["--tail", "1"], ["-f"], ["-f", "--tail", "1"]):
            done = project.orch("logs", run_id, *more)
            assert (done.code, done.out) == (5, "" if more else done.out), more
            assert "altered" in done.err
        assert project.orch("show", run_id).code == 5

    def test_a_mirror_that_is_gone_is_told_beside_what_the_ledger_holds(self, project: Project) -> None:
        project.orch("run", project.experiment(HELLO), "--host", "here")
        run_id = project.runs()[0]["run_id"]
        shutil.rmtree(project.folder / ".orch" / "runs" / run_id)
        shown = project.orch("show", run_id).out
        assert "records are gone from this machine" in shown
        assert project.orch("logs", run_id, "--tail", "3").code == 0
        assert project.runs()[0]["verdict"] == "ok"

    def test_host_records_that_were_altered_before_they_were_mirrored_are_found(
        self, project: Project
    ) -> None:
        done = project.orch("run", project.experiment("print('true')"), "--host", "here", "--detach")
        broken, good = done.out.strip(), ""
        path = project.host_root / "runs" / broken / "records" / "000000.jsonl"
        wait_until(lambda: path.exists() and b'"kind":"end"' in path.read_bytes(), "the end")
        wait_until(lambda: path.read_bytes().endswith(b'"}\n'), "the seal")
        path.write_bytes(path.read_bytes().replace(b"true", b"lies"))
        good = project.orch(
            "run", project.experiment("print('more')"), "--host", "here", "--detach"
        ).out.strip()
        wait_until(lambda: project.runs()[0]["state"] == "succeeded", "the good run")
        rows = {row["run_id"]: row for row in project.runs()}
        assert rows[good]["verdict"] == "ok"
        assert rows[broken]["verdict"] == "altered"
        assert project.observations(broken, "finding")


class TestLogs:
    def test_tail_stream_proc_and_json(self, project: Project) -> None:
        code = """
            import sys
            for i in range(1000):
                print("out", i)
                print("err", i, file=sys.stderr)
            """
        project.orch("run", project.experiment(code), "--host", "here", "--detach")
        project.orch("wait", "last")
        lines = project.orch("logs", "last", "--stream", "stderr", "--tail", "3").out.splitlines()
        assert [line.split(" | ")[1] for line in lines] == ["err 997", "err 998", "err 999"]
        assert project.orch("logs", "last", "--proc", "rank7").out == ""
        lines = project.orch("logs", "last", "--json", "--stream", "stdout").out.splitlines()
        assert len(lines) == 1000
        assert json.loads(lines[-1])["text"] == "out 999"

    def test_a_remote_escape_sequence_never_reaches_the_terminal(self, project: Project) -> None:
        code = "print('\\x1b]0;owned\\x07 \\x1b[2J \\u202e \\x9b31m')"
        done = project.orch("run", project.experiment(code), "--host", "here")
        shown = done.out + project.orch("logs", "last").out
        assert "\x1b" not in shown
        assert "\u202e" not in shown
        assert "\\x1b]0;owned" in shown

    def test_following_the_tail_shows_the_last_lines_and_then_what_comes(self, project: Project) -> None:
        project.orch("run", _slow(project), "--host", "here", "--detach")
        wait_until(lambda: "tick 10" in project.orch("logs", "last").out, "some output")
        viewer = project.start("logs", "-f", "last", "--tail", "2")
        first = _first_line(viewer)
        _go_on(project)
        out, err = _rest(viewer)
        numbers = [int(line.rsplit(b" ", 1)[1]) for line in (first + out).splitlines()]
        assert numbers == list(range(numbers[0], 60))
        assert numbers[0] >= 9
        assert b"has ended: succeeded, verdict ok" in err

    def test_the_second_ctrl_c_is_no_cancel_for_a_viewer(self, project: Project) -> None:
        project.orch("run", _slow(project), "--host", "here", "--detach")
        controller, terminal = pty.openpty()
        process = project.start("logs", "-f", "last", stderr=terminal)
        os.close(terminal)
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
        said = os.read(controller, 65536)
        os.close(controller)
        assert b"nothing was done to run" in said
        assert b"again within" not in said
        _go_on(project)
        assert project.orch("wait", "last").code == 0

    def test_logs_of_a_run_whose_host_is_away_come_from_the_mirror(
        self, start_sshd: Any, tmp_path: Path
    ) -> None:
        sshd = start_sshd()
        project = Project(tmp_path / "p", {"here": sshd.inventory_entry()})
        project.orch("run", _slow(project), "--host", "here", "--detach")
        wait_until(lambda: "tick 0" in project.orch("logs", "last").out, "the first line")
        sshd.stop()
        done = project.orch("logs", "last")
        assert done.code == 0
        assert "tick 0" in done.out
        assert "showing what is mirrored here" in done.err
        sshd.start()
        _go_on(project)
        assert project.orch("wait", "last").code == 0


def _slow(project: Project) -> Path:
    """An experiment that prints 30 of its 60 lines and waits until `_go_on`."""
    return project.experiment(SLOW, env={"GATE": str(project.folder / "gate")})


def _go_on(project: Project) -> None:
    (project.folder / "gate").touch()


def _first_line(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stdout is not None
    return process.stdout.readline()


def _rest(process: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
    """What it prints after its first line; `communicate` would lose what is in the buffer."""
    with process:
        assert process.stdout is not None
        assert process.stderr is not None
        return process.stdout.read(), process.stderr.read()


def _read_all(fd: int) -> None:
    try:
        while os.read(fd, 4096):
            pass
    except OSError:
        return
