"""`setup:` from the command line: made once, seen as runs, and what a run is told when that failed."""

from __future__ import annotations

import re
import sys
import venv
import zipfile
from pathlib import Path

from tests.project import Project, wait_until

NEEDS = {"script": "setup.sh"}


def _wheel(path: Path, name: str, code: str) -> None:
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(f"{name}.py", code)
        for part, text in (
            ("METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"),
            ("WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"),
            ("RECORD", ""),
        ):
            file.writestr(f"{name}-1.0.dist-info/{part}", text)


def _script(project: Project, text: str) -> None:
    (project.folder / "payloads" / "probe" / "setup.sh").write_text(f"#!/bin/sh\n{text}\n")


def test_requirements_are_installed_once_upon_the_packages_that_the_host_has(project: Project) -> None:
    folder, payload = project.folder / "its venv", project.folder / "payloads" / "probe"
    venv.create(folder, symlinks=True)
    packages = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    (packages / "torch_of_the_image.py").write_text("HAS = 'what the image brought'\n")
    (packages / "seen.pth").write_text(f"import sys; sys.path.append({str(Path(_pip()).parent)!r})\n")
    project.write_inventory({"here": {"transport": "local", "venv": str(folder)}})
    _wheel(payload / "wheels" / "greeter-1.0-py3-none-any.whl", "greeter", "WORD = 'what was asked for'\n")
    (payload / "needs.txt").write_text("--no-index\n./wheels/greeter-1.0-py3-none-any.whl\n")
    path = project.experiment(
        """
        import os, sys
        import greeter, torch_of_the_image
        print(greeter.WORD, torch_of_the_image.HAS, sep=" and ")
        print(sys.prefix == os.environ["VIRTUAL_ENV"], os.environ["PATH"].startswith(sys.prefix + "/bin:"))
        """,
        setup={"requirements": "needs.txt"},
    )
    done = project.orch("run", path, "--host", "here", "--json")
    assert done.code == 0, done.err
    run_id = done.json["run"]["run_id"]
    assert project.output(run_id) == "what was asked for and what the image brought\nTrue True\n"
    preparation, asked = project.runs()
    assert (preparation["group_id"], preparation["verdict"], asked["run_id"]) == (run_id, "ok", run_id)
    assert "Successfully installed greeter-1.0" in project.output(preparation["run_id"])
    assert f"here {preparation['run_id'][:8]}/main.stdout:" in done.err
    assert f"run {preparation['run_id']} has prepared requirements probe/needs.txt" in done.err
    assert "waits until" not in done.err, "that is over when the run itself is shown"
    assert f"probe/needs.txt, by run {preparation['run_id']}" in project.orch("show", "last").out

    again = project.orch("run", path, "--host", "here", "--json")
    assert (again.code, "prepare" in again.err) == (0, False), again.err
    ready = project.orch("prepare", "here", path)
    assert (ready.code, ready.err) == (0, "")
    assert ready.out.endswith(f" ago by run {preparation['run_id']}\n")


def test_a_run_whose_environment_fails_is_refused_and_the_next_one_tries_again(project: Project) -> None:
    _script(project, "echo no such package >&2; exit 7")
    path = project.experiment("print('ran')", setup=NEEDS)
    done = project.orch("run", path, "--host", "here", "--json")
    assert done.code == 3
    preparation, asked = project.runs()
    assert (preparation["verdict"], preparation["exit_code"], asked["verdict"]) == ("failed", 7, "refused")
    assert asked["reason"].startswith(
        f"the environment of probe/setup.sh was not prepared: see run {preparation['run_id']}"
    )
    assert project.output(preparation["run_id"], "stderr") == "no such package\n"
    assert project.orch("prepare", "here", path).code == 3
    _script(project, "true")
    assert project.orch("run", path, "--host", "here").code == 0


def test_a_matrix_prepares_once_before_its_cases_and_nobody_has_to_stay(project: Project) -> None:
    _script(project, f"echo made >> '{project.folder}/made'")
    path = project.experiment(
        f"print(open({str(project.folder / 'made')!r}).read())",
        params={"a": 0},
        matrix={"params": {"a": [1, 2]}, "at_once": 2},
        setup=NEEDS,
    )
    left = project.orch("run", path, "--host", "here", "--detach")
    assert left.code == 0, left.err
    group_id = left.out.split()[0]
    waited = project.orch("wait", group_id, "--json")
    assert waited.code == 0, waited.err
    cases = [(run["case"], run["verdict"]["name"]) for run in waited.json["runs"]]
    assert cases == [("script probe/setup.sh", "ok"), ("a=1", "ok"), ("a=2", "ok")]
    assert (project.folder / "made").read_text() == "made\n"


def test_prepare_is_for_what_is_there_to_be_prepared_and_can_make_it_anew(project: Project) -> None:
    path = project.experiment("print('ran')")
    nothing = project.orch("prepare", "here", path)
    assert (nothing.code, "here has no setup:" in nothing.err) == (2, True)
    (project.folder / "base.sh").write_text(f"#!/bin/sh\necho $SAID >> '{project.folder}/made'\n")
    host = {"transport": "local", "setup": {"script": "base.sh"}, "env": {"SAID": "by the host"}}
    project.write_inventory({"here": host})
    first = project.orch("prepare", "here", "--json")
    assert (first.code, first.json["prepared"][0]["run_id"]) == (0, project.runs()[0]["run_id"])
    assert project.orch("prepare", "here", "--force").code == 0
    assert (project.folder / "made").read_text() == "by the host\n" * 2
    assert "environment" in project.orch("gc", "--host", "here").out


def test_a_cancelled_run_says_that_its_preparation_goes_on_and_how_to_end_it(project: Project) -> None:
    _script(project, f"while [ ! -e '{project.folder}/go' ]; do sleep 0.05; done")
    path = project.experiment("print('ran')", setup=NEEDS)
    left = project.orch("run", path, "--host", "here", "--detach")
    assert left.code == 0, left.err
    run_id = left.out.split()[0]
    preparer = next(run["run_id"] for run in project.runs() if run["run_id"] != run_id)
    cancelled = project.orch("cancel", run_id)
    note = f"run {preparer} goes on to prepare script probe/setup.sh; `orch cancel {preparer}` ends it"
    assert note in cancelled.err
    assert project.orch("cancel", preparer).code == 0
    assert "goes on" not in project.orch("cancel", run_id).err


def test_a_forced_preparation_is_queued_behind_the_runs_that_it_names(project: Project) -> None:
    _script(project, "true")
    waits = f"""
        import os, time
        while not os.path.exists({str(project.folder / "go")!r}): time.sleep(0.05)
        """
    path = project.experiment(waits, setup=NEEDS)
    user = project.orch("run", path, "--host", "here", "--detach").out.split()[0]
    wait_until(lambda: (user, "running") in _states(project), "the run has begun")
    with project.start("prepare", "here", path, "--force") as forced:
        wait_until(lambda: "queued" in dict(_states(project)).values(), "the preparation waits")
        preparer = next(run_id for run_id, state in _states(project) if state == "queued")
        later = project.orch("run", path, "--host", "here", "--detach").out.split()[0]
        (project.folder / "go").touch()
        _, said = forced.communicate(timeout=30)
    assert forced.returncode == 0, said
    assert f"run {preparer} waits for runs that use probe/setup.sh: {user}\n" in said.decode()
    assert project.orch("wait", later).code == 0
    (awaited,) = [record for record in project.records(later) if record["kind"] == "preparing"]
    assert awaited["by"] == preparer


def test_a_setup_that_names_a_folder_is_one_line_that_says_where(project: Project) -> None:
    (project.folder / "payloads" / "probe" / "needs").mkdir()
    for kind in ("script", "requirements"):
        path = project.experiment("print('ran')", setup={kind: "needs"})
        done = project.orch("run", path, "--host", "here")
        assert (done.code, done.err.count("\n")) == (2, 1), done.err
        assert re.search(r"trial\.yaml:\d+: .*needs is a folder: name a file", done.err)


def _states(project: Project) -> list[tuple[str, str]]:
    return [(run["run_id"], run["state"]) for run in project.runs()]


def _pip() -> str:
    import pip  # noqa: PLC0415

    return str(Path(pip.__file__).parent)
