"""The project as a whole: what travels stays bare, what CI installs is pinned, what users get is complete."""

import ast
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from email import message_from_string
from importlib.metadata import requires
from pathlib import Path

import pytest
import yaml
from dflash.probes.oom import OomProbeParams
from dflash.values import build
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from orchestrator.experiment import load_experiment
from orchestrator.inventory import load_inventory

ROOT = Path(__file__).resolve().parents[2]
SUPERVISOR = sorted((ROOT / "orchestrator" / "supervisor").rglob("*.py"))
YOUNGER_THAN_3_8 = {"graphlib", "tomllib", "zoneinfo"}
OOM_PROBE = ROOT / "experiments" / "oom_probe.yaml"
OOM_PROBE_PROFILES = sorted(yaml.safe_load(OOM_PROBE.read_text(encoding="utf-8"))["profiles"])


@pytest.mark.parametrize("path", SUPERVISOR, ids=lambda path: path.name)
def test_supervisor_parses_as_python_3_8(path: Path) -> None:
    ast.parse(path.read_text(encoding="utf-8"), filename=str(path), feature_version=(3, 8))


@pytest.mark.parametrize("path", SUPERVISOR, ids=lambda path: path.name)
def test_supervisor_imports_only_itself_and_the_standard_library(path: Path) -> None:
    known = sys.stdlib_module_names - YOUNGER_THAN_3_8 | {"supervisor"}
    assert set(_imported_packages(path)) <= known


def test_supervisor_is_found() -> None:
    assert {"__init__.py", "bootstrap.py"} <= {path.name for path in SUPERVISOR}


def test_pages_link_to_files_that_exist_and_hold_no_unfilled_place() -> None:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    assert len(pages) > 5
    for page in pages:
        text = page.read_text(encoding="utf-8")
        links = [link for link in re.findall(r"\]\(([^)#]+)", text) if "://" not in link]
        assert [link for link in links if not (page.parent / link).exists()] == [], page
        assert re.findall(r"@[A-Z]{2,}@", text) == [], page


def test_each_scenario_names_tests_that_exist() -> None:
    text = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    named = re.findall(r"`([a-z]+/test_\w+\.py)`([^`|]*)", text)
    assert len(named) > 20
    for file, names in named:
        tests = (ROOT / "tests" / file).read_text(encoding="utf-8")
        for name in re.findall(r"\w+", names):
            assert f"def test_{name}" in tests, (file, name)


def test_the_picture_of_the_house_names_each_module_of_the_core_and_the_supervisor() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    modules = [
        path.name for folder in ("", "supervisor") for path in (ROOT / "orchestrator" / folder).glob("*.py")
    ]
    assert [name for name in modules if name not in text and name != "__init__.py"] == []


def test_the_readme_leads_to_every_page() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    names = [path.name for path in (ROOT / "docs").glob("*.md")]
    assert [name for name in names if f"docs/{name}" not in text] == []


def test_constraints_pin_each_package_once_to_a_public_release() -> None:
    pins = _constraints()
    assert pins["torch"] == "2.13.0"
    assert not [version for version in pins.values() if "+" in version]


def test_constraints_cover_all_that_a_development_install_brings() -> None:
    assert _closure("orch", {"dev"}) - {"orch"} <= _constraints().keys()


def test_constraints_cover_the_build_backend() -> None:
    backend = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["build-system"]["requires"]
    for requirement in backend:
        assert {canonicalize_name(requirement)} | _closure(requirement, set()) <= _constraints().keys()


def test_controller_installs_without_torch(wheel: zipfile.ZipFile) -> None:
    text = wheel.read(next(name for name in wheel.namelist() if name.endswith("/METADATA"))).decode("utf-8")
    required = [Requirement(line) for line in message_from_string(text).get_all("Requires-Dist", [])]
    plain = {requirement.name for requirement in required if _applies(requirement.marker, "")}
    assert {"fabric", "click"} <= plain
    assert "torch" not in plain


def test_wheel_carries_every_module_and_the_command(wheel: zipfile.ZipFile) -> None:
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "orchestrator").rglob("*.py")}
    shipped = {name for name in wheel.namelist() if name.endswith(".py")}
    assert shipped == sources
    entry_points = next(name for name in wheel.namelist() if name.endswith("/entry_points.txt"))
    assert "orch = orchestrator.cli.main:main" in wheel.read(entry_points).decode("utf-8")


@pytest.mark.parametrize(("ci", "outcome"), [("true", "1 failed"), ("", "1 skipped")])
def test_skip_is_a_failure_in_ci_only(tmp_path: Path, ci: str, outcome: str) -> None:
    (tmp_path / "conftest.py").write_bytes((ROOT / "tests" / "conftest.py").read_bytes())
    (tmp_path / "test_it.py").write_text(
        "import pytest\ndef test_it():\n    pytest.skip('why')\n", encoding="utf-8"
    )
    argv = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--rootdir={tmp_path}", str(tmp_path)]
    report = subprocess.run(
        argv, env={**os.environ, "CI": ci}, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert outcome in report.stdout.splitlines()[-1]


@pytest.mark.parametrize("profile", [None, *OOM_PROBE_PROFILES])
def test_oom_probe_states_every_parameter_and_the_payload_takes_them(profile: str | None) -> None:
    experiment = load_experiment(OOM_PROBE, profile=profile, overrides=[])
    params = build(OomProbeParams, experiment.params, what="parameter")
    assert set(experiment.params) == set(OomProbeParams.__dataclass_fields__)
    assert (params.device == "cpu") == (not experiment.devices)


def test_oom_probe_asks_about_the_original_size() -> None:
    size = dict(load_experiment(OOM_PROBE, profile=None, overrides=[]).params)
    assert build(OomProbeParams, {**size, "device": "cuda", "seed": 0}, what="parameter") == OomProbeParams()


@pytest.mark.parametrize("profile", [None, "cpu"])
def test_the_payload_takes_every_case_of_the_memory_matrix(profile: str | None) -> None:
    experiment = load_experiment(ROOT / "experiments" / "memory_matrix.yaml", profile=profile, overrides=[])
    cases = experiment.cases()
    params = {build(OomProbeParams, case.params, what="parameter") for case in cases}
    assert len(params) == len(cases) == 6
    assert {param.device == "cpu" for param in params} == {not experiment.devices}


def test_examples_in_the_inventory_are_valid_hosts(tmp_path: Path) -> None:
    text = (ROOT / "inventory.yaml").read_text(encoding="utf-8")
    everything = tmp_path / "inventory.yaml"
    everything.write_text(re.sub(r"(?m)^  # ( *[\w-]+:(?: \S+)?)$", r"  \1", text), encoding="utf-8")
    assert "local" in load_inventory(ROOT / "inventory.yaml").hosts
    assert {"local", "rented", "pve-200", "gpu-container", "lab-gpu"} <= load_inventory(
        everything
    ).hosts.keys()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)], cwd=ROOT, check=True
    )
    (built,) = folder.glob("*.whl")
    with zipfile.ZipFile(built) as archive:
        yield archive


def _imported_packages(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Import(names=names):
                yield from (alias.name.partition(".")[0] for alias in names)
            case ast.ImportFrom(module=str(module), level=0):
                yield module.partition(".")[0]
            case ast.ImportFrom(level=level):
                assert level == 1, f"{path.name} imports from outside its package"


def _constraints() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [re.fullmatch(r"([\w.-]+)==(\S+)", line) for line in lines if not line.startswith("#")]
    named = [(canonicalize_name(pin[1]), pin[2]) for pin in pins if pin]
    assert len(named) == len(pins) == len(dict(named))
    return dict(named)


def _closure(name: str, extras: set[str]) -> set[str]:
    """Everything that an installed distribution requires here, except CUDA's libraries under torch."""
    found: set[str] = set()
    waiting = [(name, extra) for extra in {"", *extras}]
    seen = set(waiting)
    while waiting:
        current, extra = waiting.pop()
        for requirement in map(Requirement, requires(current) or []):
            required = canonicalize_name(requirement.name)
            if not _applies(requirement.marker, extra) or re.match("nvidia-|cuda-|triton", required):
                continue
            found.add(required)
            new = {(required, wanted) for wanted in {"", *requirement.extras}} - seen
            seen |= new
            waiting += new
    return found


def _applies(marker: Marker | None, extra: str) -> bool:
    return marker is None or marker.evaluate({"extra": extra})
