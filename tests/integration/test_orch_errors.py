"""Bad input: one clear line, exit code 2, nothing half-done. A host that cannot: the same with code 3."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_orch_run import HELLO
from tests.project import ORCH, Done, Project
from tests.sshd import Sshd

ODD_NAMES = (
    "a b",
    "it's",
    'say "x"',
    "two\nlines",
    "-dash",
    "$(touch pwned)",
    ";touch pwned",
    "\x1b[2J",
    "..",
    "",
)


@pytest.fixture
def project(tmp_path: Path) -> Project:
    project = Project(tmp_path / "my project")
    project.experiment(HELLO, params={"size": 1}, profiles={"small": {"params": {"size": 0}}})
    return project


def assert_refused(project: Project, done: Done, *parts: str) -> None:
    """One line, exit code 2, and no trace of a run here or on the host."""
    assert done.code == 2, (done.code, done.err)
    assert done.out == ""
    assert done.err.startswith("orch: ")
    assert done.err.count("\n") == 1, done.err
    assert "\x1b" not in done.err
    for part in parts:
        assert part in done.err
    assert not project.host_root.exists()
    assert not list((project.folder / ".orch").glob("runs/*"))
    assert not list(project.folder.rglob("pwned"))


class TestBadInput:
    @pytest.mark.parametrize(
        ("words", "parts"),
        [
            (["run"], ("'FILE'", "orch run --help")),
            (["run", "go.sh", "--host", "here"], ("'go.sh' is neither an experiment", "orch exec NAME --")),
            (["hosts", "add", "here", "root@box"], ("there is a host 'here' already: change it in",)),
            (["hosts", "add", "new", "ssh://root@box"], ("'ssh://root@box' is not [USER@]HOST[:PORT]",)),
            (["rerun"], ("'RUN'", "orch rerun --help")),
            (["exec", "here"], ("COMMAND", "orch exec --help")),
            (["gc", "--host"], ("--host", "orch gc --help")),
            (["exec", "here", "uname", "-a"], ("'-a'", "own options go behind --")),
            (["run", "script.py", "--host", "here", "--n", "3"], ("'--n'", "own options go behind --")),
            (["exec", "--timout", "1m", "here", "--", "uname"], ("'--timout'", "'--timeout'")),
        ],
    )
    def test_words_that_are_missing_or_unknown_are_named_with_the_help_to_read(
        self, project: Project, words: list[str], parts: tuple[str, ...]
    ) -> None:
        assert_refused(project, project.orch(*words), *parts)

    @pytest.mark.parametrize(
        ("text", "parts"),
        [
            ("payload: [", ("trial.yaml", ":1")),
            ("- a\n- b\n", ("trial.yaml",)),
            (
                "payload: probe\nrun: probe.trial\nparms: {}\n",
                ("trial.yaml:3", "parms", "did you mean 'params'"),
            ),
            ("payload: probe\nrun: probe.trial\ntimeout: soon\n", ("trial.yaml:3", "soon")),
            ("payload: probe\nrun: probe.trial\npayload: probe\n", ("trial.yaml:3", "payload")),
            ("payload: probe\n", ("run",)),
            ("payload: nothing\nrun: nothing.x\n", ("nothing", "probe")),
            ("payload: probe\nrun: probe.trail\n", ("probe.trail", "did you mean 'probe.trial'")),
            ("payload: ../probe\nrun: probe.trial\n", ("../probe",)),
            ("payload: probe\nrun: os.path\n", ("os.path",)),
            (
                "payload: probe\nrun: probe.trial\nalloc_conf: {expandable_segment: true}\n",
                ("trial.yaml:3", "expandable_segments"),
            ),
            (
                "payload: probe\nrun: probe.trial\nalloc_conf: {max_split_size_mb: 3}\n",
                ("trial.yaml:3", "20"),
            ),
            ("payload: probe\nrun: probe.trial\nalloc_conf: expandable_segments\n", ("trial.yaml:3",)),
            (
                "payload: probe\nrun: probe.trial\nenv: {PYTORCH_CUDA_ALLOC_CONF: x}\n",
                ("trial.yaml:3", "alloc_conf"),
            ),
            ("payload: probe\nrun: probe.trial\ndevices: cuda:5\n", ("trial.yaml:3",)),
            (
                "payload: probe\nrun: probe.trial\nprofiles: {x: {evn: {}}}\n",
                ("trial.yaml:3", "did you mean 'env'"),
            ),
        ],
    )
    def test_a_bad_experiment_names_file_line_and_key(
        self, project: Project, text: str, parts: tuple[str, ...]
    ) -> None:
        path = project.folder / "experiments" / "trial.yaml"
        path.write_text(text)
        assert_refused(project, project.orch("run", path, "--host", "here"), *parts)

    def test_a_missing_or_unreadable_file(self, project: Project) -> None:
        assert_refused(
            project, project.orch("run", "experiments/nothing.yaml", "--host", "here"), "nothing.yaml"
        )
        assert_refused(project, project.orch("run", "experiments", "--host", "here"), "experiments")
        (project.folder / "experiments" / "trial.yaml").write_bytes(b"\xff\xfe\x00")
        assert_refused(project, project.orch("run", "experiments/trial.yaml", "--host", "here"), "trial.yaml")

    def test_a_bad_inventory_names_file_and_line(self, project: Project) -> None:
        (project.folder / "inventory.yaml").write_text(
            "hosts:\n  here:\n    transport: local\n    prot: 22\n"
        )
        done = project.orch("run", "experiments/trial.yaml", "--host", "here")
        assert_refused(project, done, "inventory.yaml:4", "did you mean 'port'")
        done = project.orch("run", "experiments/trial.yaml", "--host", "here", "--inventory", "nowhere.yaml")
        assert_refused(project, done, "nowhere.yaml")

    def test_names_that_do_not_exist_list_what_does(self, project: Project) -> None:
        run = ("run", "experiments/trial.yaml", "--host")
        assert_refused(project, project.orch(*run, "hree"), "hree", "here", "did you mean")
        assert_refused(project, project.orch(*run, "here", "--profile", "smal"), "did you mean 'small'")
        assert_refused(project, project.orch(*run, "here", "--set", "sise=3"), "did you mean 'size'")
        assert_refused(project, project.orch(*run, "here", "--set", "size"), "size")
        assert_refused(project, project.orch("run", "experiments/trial.yaml"), "--host", "here")
        assert_refused(project, project.orch("rnu"), "did you mean 'run'")
        assert_refused(project, project.orch("cancel", "x", "--grace", "nan"), "--grace", "90s")
        assert_refused(project, project.orch("ps", "-n", "9" * 30), "-n")
        assert_refused(project, project.orch("logs", "--tale", "3", "x"), "--tale")

    @pytest.mark.parametrize("command", ["logs", "show", "wait", "cancel"])
    def test_an_unknown_run(self, project: Project, command: str) -> None:
        assert_refused(project, project.orch(command, "nothing"), "nothing", "orch ps")
        assert_refused(project, project.orch(command, "last"), "last")

    @pytest.mark.parametrize("name", ODD_NAMES)
    def test_odd_names_anywhere_are_refused_and_never_interpreted(self, project: Project, name: str) -> None:
        run = ("run", "experiments/trial.yaml")
        assert_refused(project, project.orch(*run, f"--host={name}"))
        assert_refused(project, project.orch(*run, "--host=here", f"--profile={name}"))
        assert_refused(project, project.orch(*run, "--host=here", f"--set={name}=1"))
        assert_refused(project, project.orch("run", "--host=here", "--", name))
        assert_refused(project, project.orch("show", "--", name))
        odd = project.folder / "experiments" / f"{name}.yaml"
        if name not in ("..", ""):
            shutil.copy(project.folder / "experiments" / "trial.yaml", odd.parent / odd.name)
            assert_refused(project, project.orch("run", "--host=here", "--", odd))


def assert_unfit(done: Done, *parts: str) -> None:
    assert done.code == 3, (done.code, done.err, done.out)
    lines = [line for line in done.err.splitlines() if line.startswith("orch: here:")]
    assert lines or done.out, done.err
    for part in parts:
        assert part in done.err + done.out, (part, done.err, done.out)
    assert "Traceback" not in done.err


class TestHostsThatCannot:
    @pytest.fixture
    def remote(self, sshd: Sshd, project: Project) -> Callable[..., Done]:
        """Runs the trial over ssh with some of the host's entry changed."""

        def run(**changes: Any) -> Done:
            project.write_inventory({"here": sshd.inventory_entry(**changes)})
            return project.orch("run", "experiments/trial.yaml", "--host", "here")

        return run

    def test_nobody_listens(self, remote: Callable[..., Done], project: Project) -> None:
        assert_unfit(remote(port=1), "127.0.0.1", "1")
        assert project.runs()[0]["state"] == "refused"

    def test_a_changed_key_is_refused_with_both_fingerprints(
        self, remote: Callable[..., Done], sshd: Sshd
    ) -> None:
        pinned, before = sshd.host_key(), sshd.fingerprint()
        sshd.rotate_host_key()
        assert_unfit(remote(host_key=pinned), before, sshd.fingerprint())

    def test_an_unknown_key_is_refused_with_the_next_step(
        self, remote: Callable[..., Done], sshd: Sshd
    ) -> None:
        assert_unfit(remote(host_key=None), sshd.fingerprint(), "host_key:")

    def test_a_refused_login(self, remote: Callable[..., Done], sshd: Sshd) -> None:
        (sshd.folder / "authorized_keys").write_text("")
        assert_unfit(remote(), sshd.user)

    def test_no_python(self, remote: Callable[..., Done]) -> None:
        assert_unfit(remote(python="/nowhere/python3"), "/nowhere/python3", "python:")

    def test_an_interpreter_that_ends_at_once(self, remote: Callable[..., Done], project: Project) -> None:
        assert_unfit(remote(python="/bin/false"), "exit status 1")
        project.write_inventory({"here": {"transport": "local", "python": "/bin/false"}})
        assert_unfit(project.orch("run", "experiments/trial.yaml", "--host", "here"), "exit status 1")

    def test_a_python_below_the_home_folder(self, project: Project, home: Path) -> None:
        (home / "my venv").mkdir()
        (home / "my venv" / "python").symlink_to(sys.executable)
        project.write_inventory({"here": {"transport": "local", "python": "~/my venv/python"}})
        done = project.orch("run", "experiments/trial.yaml", "--host", "here")
        assert done.code == 0, done.err

    @pytest.mark.parametrize("version", ["2.7", "3.6", "3.7"])
    def test_a_python_that_is_too_old(self, remote: Callable[..., Done], version: str) -> None:
        said = "older than Python 3.4" if version == "2.7" else f"Python {version}"
        assert_unfit(remote(python=old_python(version)), said, "need 3.8", "python:")

    def test_a_python_without_its_library(self, remote: Callable[..., Done], tmp_path: Path) -> None:
        python = bare_python(tmp_path / "bare", "json")
        assert_unfit(remote(python=python), "has no module json", "apt-get install python3", "'python:'")

    def test_no_torch(self, remote: Callable[..., Done], project: Project) -> None:
        project.experiment("import torch_that_is_not_there")
        assert_unfit(remote(), "torch_that_is_not_there")

    def test_a_device_that_is_not_there(self, remote: Callable[..., Done], project: Project) -> None:
        project.experiment(HELLO, devices=[99])
        assert_unfit(remote(), "nvidia-smi is not there" if shutil.which("nvidia-smi") is None else "card 99")

    def test_a_root_that_cannot_be_used(self, remote: Callable[..., Done], tmp_path: Path) -> None:
        open_to_all = tmp_path / "open"
        open_to_all.mkdir()
        open_to_all.chmod(0o777)
        assert_unfit(remote(root=str(open_to_all)), "writable by others", "root:")
        assert_unfit(remote(root="/proc/nothing"), "/proc/nothing")

    def test_a_noisy_shell_and_a_banner_break_nothing(self, start_sshd: Any, project: Project) -> None:
        banner = project.folder / "banner"
        banner.write_text("WELCOME TO THE BOX\n")
        sshd = start_sshd(options={"Banner": f'"{banner}"'})
        (sshd.home / ".bashrc").write_text("echo noise; echo more noise >&2; printf 'no newline'\n")
        project.write_inventory({"here": sshd.inventory_entry()})
        done = project.orch("run", "experiments/trial.yaml", "--host", "here")
        assert done.code == 0, done.err
        assert project.output(project.runs()[0]["run_id"]) == "hello {'size': 1}\n"

    def test_a_shell_that_only_talks_gets_one_clear_error(self, start_sshd: Any, project: Project) -> None:
        sshd = start_sshd(options={"ForceCommand": "echo this account is not available"})
        project.write_inventory({"here": sshd.inventory_entry()})
        done = project.orch("run", "experiments/trial.yaml", "--host", "here")
        assert_unfit(done, "this account is not available")


def old_python(version: str) -> str:
    """Returns a real interpreter of an old version, or skips."""
    found = shutil.which(f"python{version}")
    home = pwd.getpwuid(os.getuid()).pw_dir  # HOME is a folder of the test's own
    pyenv = Path(os.environ.get("PYENV_ROOT", f"{home}/.pyenv"))
    candidates = sorted(pyenv.glob(f"versions/{version}.*/bin/python"))
    if candidates:
        return str(candidates[0])
    if found is None:
        pytest.skip(f"no Python {version} on this machine")
    return found


def bare_python(folder: Path, *missing: str) -> str:
    """Makes a real interpreter, without torch, whose standard library lacks files, as python3-minimal's."""
    base, library = Path(sys._base_executable), Path(sysconfig.get_path("stdlib"))  # type: ignore[attr-defined]
    (folder / "bin").mkdir(parents=True)
    shutil.copy(base.resolve(), folder / "bin" / "python3")
    there = folder / library.parent.name / library.name
    there.mkdir(parents=True)
    for path in library.iterdir():
        if path.name not in missing:
            (there / path.name).symlink_to(path)
    return str(folder / "bin" / "python3")


def test_streams_that_are_closed_full_or_plain_ascii(project: Project) -> None:
    run = f"'{ORCH}' run experiments/trial.yaml --host here"
    project.experiment("print('grüße 🎉')")
    for redirect, env, code in (
        (">&-", {}, 0),
        ("2>&-", {}, 0),
        (">/dev/full", {}, 4),
        ("", {"PYTHONIOENCODING": "ascii"}, 0),
        ("", {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, 0),
    ):
        done = subprocess.run(
            ["bash", "-c", f"{run} {redirect}"],
            cwd=project.folder,
            env={**os.environ, **env},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, "Traceback" in done.stderr) == (code, False), (redirect, env, done.stderr)


def test_a_folder_that_is_gone(project: Project) -> None:
    command = f"mkdir gone && cd gone && rmdir ../gone && '{ORCH}' ps"
    done = subprocess.run(
        ["bash", "-c", command], cwd=project.folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "folder is gone" in done.stderr


def test_bare_orch_shows_its_help(project: Project) -> None:
    done = project.orch()
    assert (done.code, "Commands:\n" in done.out + done.err) == (2, True)


def test_help_imports_nothing_heavy(project: Project) -> None:
    code = (
        "import sys\nfrom orchestrator.cli.main import cli\ncli.main(['--help'], standalone_mode=False)\n"
        "heavy = {'torch', 'fabric', 'paramiko', 'pydantic', 'rich', 'yaml', 'sqlite3'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = project.orch("--help")
    assert done.code == 0
    assert "Commands:" in done.out
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
