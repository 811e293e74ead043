"""What every test gets: a home of its own, an environment that nobody typed into, and no silent skip in CI.

Fixtures for one part of the suite (an sshd, torch's defaults) stand in the conftest beside those tests.
"""

import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.project import Project

IN_CI = os.environ.get("CI") == "true"

# Without a card Triton's interpreter runs kernels; it asks when it is first loaded.
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"

# A person's shell decides nothing here, but for CUDA_VISIBLE_DEVICES, the card that GPU tests may use.
FOREIGN_PREFIXES = ("ORCH_", "GIT_", "PYTORCH_", "SSH_", "XDG_")

settings.register_profile("project", deadline=None)
settings.register_profile("project-ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("project-ci" if IN_CI else "project")


@pytest.fixture(scope="session", autouse=True)
def _clean_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """For fixtures of the whole session: no variable of the caller's, and a home that is not theirs."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(FOREIGN_PREFIXES)]:
            patch.delenv(name)
        patch.setenv("HOME", str(tmp_path_factory.mktemp("session-home")))
        patch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)  # each `orch` would be compiled anew
        patch.setenv("GIT_CONFIG_NOSYSTEM", "1")
        for role in ("AUTHOR", "COMMITTER"):
            patch.setenv(f"GIT_{role}_NAME", "Test")
            patch.setenv(f"GIT_{role}_EMAIL", "test@example.invalid")
        yield


@pytest.fixture(autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home: `~/.orch` and `~/.ssh` belong to this test alone."""
    folder = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HOME", str(folder))
    return folder


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    """A project whose host ``here`` is this machine; nothing of it runs on afterwards."""
    project = Project(tmp_path / "my project")
    yield project
    project.end_all()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turns a skip into a failure in CI, where everything that the suite needs is installed."""
    report = yield
    if IN_CI and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid}: skipped in CI: {report.longrepr}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Does the same for a whole module that skips itself."""
    report = yield
    if IN_CI and report.skipped:
        report.outcome = "failed"
        report.longrepr = f"{report.nodeid}: skipped in CI: {report.longrepr}"
    return report
