"""Why memory was out, from the command line: the two mysteries, other causes, and what cannot be said."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.project import Project

REPOSITORY = Path(__file__).parents[2]
MESSAGE = (
    "CUDA out of memory. Tried to allocate {asked}. GPU 0 has a total capacity of 94.97 GiB of which {free} "
    "is free. Including non-PyTorch memory, this process has {own} memory in use. Of the allocated memory "
    "{allocated} is allocated by PyTorch, and 1.05 GiB is reserved by PyTorch but unallocated. If reserved "
    "but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
)
FIRST = MESSAGE.format(asked="15.09 GiB", free="10.20 GiB", own="84.77 GiB", allocated="83.10 GiB")
SECOND = MESSAGE.format(asked="22.31 GiB", free="14.97 GiB", own="80.00 GiB", allocated="78.40 GiB")
PARAMS = {"max_anchors": 512, "block_size": 16, "seq_len": 7260, "attention": "flex", "compile": False}
MATH = {
    "max_anchors": 1024,
    "block_size": 32,
    "seq_len": 8000,
    "attention": "sdpa_math",
    "chunk_blocks": 182,
}

# A process that prints what an older one printed, whatever its own parameters are.
STALE = f"""
import sys
class OutOfMemoryError(RuntimeError):
    pass
print("training", flush=True)
raise OutOfMemoryError({FIRST!r})
"""


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    """A project with the drafter as its payload, and a module in it that fails as a probe once did."""
    project = Project(tmp_path / "my project")
    shutil.copytree(
        REPOSITORY / "payloads" / "dflash",
        project.folder / "payloads" / "dflash",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    yield project
    project.end_all()


def experiment(project: Project, code: str, **keys: Any) -> Path:
    (project.folder / "payloads" / "dflash" / "stale.py").write_text(code)
    path = project.folder / "experiments" / "stale.yaml"
    path.write_text(yaml.safe_dump({"payload": "dflash", "run": "dflash.stale", **keys}))
    return path


def test_a_log_that_belongs_to_another_configuration_is_told_from_the_right_one(project: Project) -> None:
    path = experiment(project, STALE, params=PARAMS, matrix={"params": {"max_anchors": [512, 256, 128]}})
    done = project.orch("run", path, "--host", "here")
    assert done.code == 1, done.err
    runs = {row["job"]["params"]["max_anchors"]: row["run_id"] for row in project.runs()}
    assert f"  more: orch explain {runs[256]}" in done.out.splitlines(), "each says why in a line of its own"

    right = project.orch("explain", runs[512])
    assert right.code == 0, right.err
    first, *rest = right.out.splitlines()
    assert first.startswith(
        "out of memory: attention scores, [32, 8192, 15452] float32, 15.09 GiB asked; too"
    )
    assert any("queries 8192 = max_anchors · block_size = 512 · 16" in line for line in rest)
    assert any("keys 15447…15457, context tokens 7,255…7,265 of at most 8,192" in line for line in rest)
    assert any("made in dflash.attention.flex._attend" in line for line in rest)
    assert any("  compile=True: " in line for line in rest), "attention is flex already"

    assert "orch logs --where" not in right.out
    other = project.orch("explain", runs[128]).out
    (where,) = (line for line in other.splitlines() if "orch logs --where" in line)
    assert project.orch(*where.split(": orch ")[1].split()).code == 0

    found = project.orch("explain", runs[256], "--json").json
    says = f"this log may not be this configuration's: 15.09 GiB is attention scores of run {runs[512]}, "
    assert found["answer"].startswith(says + "[32, 8192, 15452] float32")
    assert found["tensor"]["not_this_run"] is True
    assert "max_anchors is 512 (here 256)" in " ".join(found["tensor"]["candidates"][0]["evidence"])
    assert found["would_fit"] == []
    assert done.out.count(says) == 2, "that of 128 anchors says the same"


def test_a_single_run_ends_with_a_short_explanation(project: Project) -> None:
    done = project.orch("run", experiment(project, STALE, params=PARAMS), "--host", "here", "--json")
    assert done.code == 1
    assert done.json["verdict"]["name"] == "oom", "standard output is JSON alone"
    begin = done.err.index("out of memory: attention scores")
    lines = done.err[begin:].splitlines()
    assert len(lines) <= 12
    assert lines[-1] == f"  more: orch explain {done.json['run']['run_id']}"

    # Explained from what is here: the host is gone, and the payload's folder.
    shutil.rmtree(project.host_root)
    shutil.rmtree(project.folder / "payloads" / "dflash")
    again = project.orch("explain", "last")
    assert again.code == 0, again.err
    assert again.out.splitlines()[0] == lines[0]
    assert any("main.stderr:" in line and "15.09 GiB" in line for line in again.out.splitlines())


def test_a_pasted_message_is_explained_by_parameters_alone(project: Project, tmp_path: Path) -> None:
    params, log = tmp_path / "params.json", tmp_path / "train.log"
    params.write_text(json.dumps(MATH))
    log.write_text(f"step 1\n[rank0]: torch.OutOfMemoryError: {SECOND}\nshutting down\n")
    found = project.orch("explain", "--message", log, "--params", params, "--json").json
    best = found["tensor"]["candidates"][0]
    assert best["shape"] == [182, 32, 8032, 128]
    assert (best["dtype"], best["category"]) == ("float32", "scores")
    evidence = " ".join(best["evidence"])
    for words in (
        "8 key-value heads are expanded to 32",
        "upcast to float32",
        "11.15 GiB",
        "sdpa_math allows",
    ):
        assert words in evidence


def test_a_message_on_standard_input_goes_over_an_experiment_s_parameters(
    project: Project, tmp_path: Path
) -> None:
    path = experiment(project, STALE, params={**MATH, "chunk_blocks": 64})
    params = tmp_path / "params.json"
    params.write_text('{"chunk_blocks": 182}')
    log = tmp_path / "log"
    log.write_text(SECOND)
    with log.open("rb") as stdin:
        done = project.orch(
            "explain", "--message", "-", "--experiment", path, "--params", params, stdin=stdin
        )
    assert done.code == 0, done.err
    assert done.out.startswith(
        "out of memory: expanded keys or values of the math path, [182, 32, 8032, 128]"
    )


SCRIPT = """
import sys
sys.stderr.write("NCCL WARN Cuda failure 2 'out of memory'\\n")
sys.exit(3)
"""


def test_a_script_s_output_is_evidence_too(tmp_path: Path) -> None:
    project = Project(tmp_path / "p")
    script = project.folder / "fails.py"
    script.write_text(SCRIPT)
    assert project.orch("run", script, "--host", "here", "--detach").code == 0
    says = "out of memory: NCCL got no memory on the card beside torch's allocator"
    assert says in project.orch("wait", "last").out
    done = project.orch("explain", "last")
    assert done.out.splitlines()[0] == says
    assert "main.stderr:1 | NCCL WARN Cuda failure 2 'out of memory'" in done.out
