"""Scripts and commands as runs, from the command line to a verdict."""

from __future__ import annotations

import venv
from typing import Any

import pytest

from tests.project import Project
from tests.sshd import Sshd

ARGS = ["--lr", "a 'b' $(id)"]
SCRIPT = """
import os, sys
print(sys.argv[1:], __name__, os.path.basename(__file__), os.environ.get("MODE"))
"""


def test_a_script_runs_with_its_arguments_and_is_a_run_like_any_other(project: Project) -> None:
    (project.folder / "my script.py").write_text(SCRIPT)
    asked = ("--host", "here", "--env", "MODE=fast", "--timeout", "1m", "--grace", "0")
    done = project.orch("run", "my script.py", *asked, "--json", "--", *ARGS)
    assert done.code == 0, done.err
    first = done.json["run"]["run_id"]
    assert project.output(first) == f"{ARGS} __main__ my script.py fast\n"
    job = project.records(first)[0]["job"]
    assert (job["timeout_s"], job["grace_s"], job["script"]) == (60.0, 0.0, "my script.py")
    assert "(1 file, " in done.err
    (project.folder / "my script.py").write_text("raise SystemExit(7)")
    assert project.orch("rerun", first).code == 0
    second = project.orch("run", "my script.py", "--host", "here", "--json")
    assert (second.code, second.json["run"]["exit_code"]) == (1, 7)
    assert "script       'my script.py' --lr" in project.orch("show", first).out
    asked_changes = project.orch("diff", first, "last", "--json").json["asked"]
    assert {"name": "args", "a": ARGS, "b": []} in asked_changes


def test_a_script_of_a_payload_brings_it(project: Project) -> None:
    project.experiment("print('imported')", name="part")
    (project.folder / "payloads" / "probe" / "tool.py").write_text("import probe.part\nimport part\n")
    done = project.orch("run", "payloads/probe/tool.py", "--host", "here", "--json")
    assert done.code == 0, done.err
    assert project.output(done.json["run"]["run_id"]) == "imported\nimported\n"


def test_a_command_gets_its_arguments_as_they_are_and_its_exit_code_is_the_result(project: Project) -> None:
    done = project.orch("exec", "here", "--json", "--", "printf", "%s|", "$HOME", "a b", "*")
    assert done.code == 0, done.err
    assert project.output(done.json["run"]["run_id"]) == "$HOME|a b|*|"
    assert "no code is sent" in done.err
    done = project.orch("exec", "here", "--json", "--env", "A=5", "--", "sh", "-c", "exit $A")
    assert (done.code, done.json["run"]["exit_code"]) == (1, 5)


def test_a_command_that_is_not_there_is_refused_by_its_name(project: Project) -> None:
    done = project.orch("exec", "here", "--", "no-such-program")
    assert done.code == 3
    assert "no-such-program" in done.out
    assert "refused (not good)" in done.out


def test_what_belongs_into_a_file_or_to_a_script_is_told_apart(project: Project) -> None:
    path = project.experiment(SCRIPT)
    (project.folder / "x.py").touch()
    for arguments, message in (
        ((path, "--devices", "0"), "--devices is for scripts (….py): write `devices:` in"),
        ((path, "--alloc-conf", "a:1"), "write `alloc_conf:` in"),
        ((path, "--", "--lr"), "arguments are for scripts"),
        (("x.py", "--set", "a=1"), "--set is for experiments"),
        (("x.py", "--profile", "p"), "--profile is for experiments"),
    ):
        done = project.orch("run", "--host", "here", *arguments)
        assert (done.code, message in done.err) == (2, True), done.err
    assert project.runs() == []


@pytest.mark.parametrize("transport", ["local", "ssh"])
def test_a_virtual_environment_and_a_working_folder_are_the_payloads(
    project: Project, request: pytest.FixtureRequest, transport: str
) -> None:
    folder, work = project.folder / "my venv", project.folder / "my work"
    venv.create(folder, symlinks=True)
    (folder / "bin" / "tool").write_text("#!/bin/sh\necho a tool of its own\n")
    (folder / "bin" / "tool").chmod(0o755)
    work.mkdir()
    entry: dict[str, Any] = {"transport": "local"}
    if transport == "ssh":
        entry = request.getfixturevalue("sshd").inventory_entry()
        del entry["python"]
    project.write_inventory({"here": {**entry, "venv": str(folder), "workdir": str(work)}})
    (project.folder / "where.py").write_text(
        "import os, subprocess, sys\n"
        "print(sys.prefix, os.environ['VIRTUAL_ENV'], os.getcwd(), sep='|', flush=True)\n"
        "subprocess.run(['tool'], check=True)\n"
    )
    done = project.orch("run", "where.py", "--host", "here", "--json")
    assert done.code == 0, done.err
    printed = project.output(done.json["run"]["run_id"])
    assert printed == f"{folder}|{folder}|{work}\na tool of its own\n"


def test_a_virtual_environment_that_is_not_there_is_named(project: Project) -> None:
    missing = project.folder / "no venv"
    project.write_inventory({"here": {"transport": "local", "venv": str(missing)}})
    done = project.orch("exec", "here", "--", "true")
    assert done.code == 3
    assert f"{missing}/bin/python" in done.err


def test_a_home_relative_interpreter_is_below_home_wherever_a_log_in_begins(
    project: Project, sshd: Sshd
) -> None:
    # This server's HOME is not the folder in which its shells start.
    venv.create(sshd.home / "my venv", symlinks=True)
    entry = sshd.inventory_entry()
    del entry["python"]
    for keys in ({"venv": "~/my venv"}, {"python": "~/my venv/bin/python"}):
        project.write_inventory({"here": {**entry, **keys}})
        (project.folder / "where.py").write_text("import sys; print(sys.prefix)\n")
        done = project.orch("run", "where.py", "--host", "here", "--json")
        assert done.code == 0, done.err
        assert project.output(done.json["run"]["run_id"]) == f"{sshd.home / 'my venv'}\n"


def test_a_missing_environment_is_named_by_its_own_key(project: Project, sshd: Sshd) -> None:
    entry = sshd.inventory_entry()
    del entry["python"]
    project.write_inventory({"here": {**entry, "venv": "~/nope"}})
    done = project.orch("exec", "here", "--", "true")
    assert done.code == 3
    assert "~/nope/bin/python" in done.err
    assert "set 'venv:'" in done.err
