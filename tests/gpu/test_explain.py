"""Failures planted on a card, each a real one, and what `orch explain` says of it first.

Each runs through `orch run` on this machine. A limit makes the card small, but where the card itself has to
be full.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.project import Project, wait_until

pytestmark = pytest.mark.gpu

GIB = 2**30
REPOSITORY = Path(__file__).parents[2]
HOLDER = """
    import sys, torch
    free, _ = torch.cuda.mem_get_info()
    held = torch.empty(free - 6 * 2**30, dtype=torch.uint8, device="cuda")
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def project(card: torch.device, tmp_path: Path) -> Iterator[Project]:
    torch.cuda.empty_cache()
    project = Project(tmp_path / "p", {"here": {"transport": "local", "python": sys.executable}})
    yield project
    project.end_all()


def limit_gib(room_gib: float) -> str:
    """Returns a limit that leaves so much beside what is in use."""
    free, total = torch.cuda.mem_get_info()
    return f"{(total - free) / GIB + room_gib:.2f}GiB"


def explained(project: Project, code: str, *options: str, is_limited: bool = True) -> dict[str, Any]:
    """Runs a script that fails, and returns what is said of it."""
    script = project.folder / "fails.py"
    script.write_text(textwrap.dedent(code))
    limit = ["--memory-limit", limit_gib(6)] if is_limited else []
    done = project.orch("run", script, "--host", "here", "--devices", "0", "--share", *limit, *options)
    assert done.code == 1, done.err
    found: dict[str, Any] = project.orch("explain", "last", "--json").json
    assert found["answer"] in done.out, "the run ends with the same line"
    return found


def test_logits_in_float32_are_told_by_their_line(project: Project) -> None:
    found = explained(
        project,
        """
        import torch
        head = torch.randn(64_000, 1024, device="cuda", dtype=torch.bfloat16)
        rows = torch.randn(20_000, 1024, device="cuda", dtype=torch.bfloat16)
        logits = rows @ head.T
        logits.float()
        """,
    )
    assert found["cause"]["name"] in ("memory limit", "too large")
    assert found["capture"]["stack"][0].startswith("fails.py:6")
    assert found["balance"]["asked_bytes"] >= 64_000 * 20_000 * 4


def test_pieces_that_are_too_small_are_fragmentation(project: Project) -> None:
    found = explained(
        project,
        """
        import torch
        blocks = [torch.empty(2**28, dtype=torch.uint8, device="cuda") for _ in range(4)]
        whole = torch.empty(4 * 2**30, dtype=torch.uint8, device="cuda")
        del whole
        kept = [torch.empty(2**26, dtype=torch.uint8, device="cuda") for _ in range(64)]
        del kept[::2]
        torch.empty(2**30 + 2**29, dtype=torch.uint8, device="cuda")
        """,
    )
    assert found["cause"]["name"] == "fragmentation"
    assert found["balance"]["largest_free_bytes"] < found["balance"]["asked_bytes"]
    assert "expandable_segments:True" in found["cause"]["advice"]


def test_memory_that_another_process_holds_is_told_with_its_number(project: Project, tmp_path: Path) -> None:
    holder = tmp_path / "holder.py"
    holder.write_text(textwrap.dedent(HOLDER))
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, holder], stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        wait_until(lambda: process.stdout and process.stdout.readline(), "another process to fill the card")
        code = 'import torch\ntorch.empty(12 * 2**30, dtype=torch.uint8, device="cuda")\n'
        found = explained(project, code, is_limited=False)
        process.communicate()
    assert found["cause"]["name"] == "taken by another process"
    assert sum(size for _, size in found["balance"]["others"]) > 8 * GIB


def test_memory_that_grows_with_every_step_is_a_leak(project: Project) -> None:
    found = explained(
        project,
        """
        import json, os, torch
        fd = int(os.environ["ORCH_EVENTS_FD"].split(":")[0])
        weight, losses = torch.randn(4096, 4096, device="cuda", requires_grad=True), []
        for step in range(10_000):
            losses.append((torch.randn(4096, 4096, device="cuda") @ weight).exp().sum())
            used = {"kind": "metric", "name": "allocated_bytes", "value": torch.cuda.memory_allocated()}
            os.write(fd, json.dumps(used).encode() + b"\\n")
        """,
    )
    assert found["cause"]["name"] == "leak across iterations"


def test_the_run_s_own_limit_is_told_from_a_full_card(project: Project) -> None:
    free, _ = torch.cuda.mem_get_info()
    assert free > 20 * GIB, "the card has to be larger than its limit"
    found = explained(project, 'import torch\ntorch.empty(12 * 2**30, dtype=torch.uint8, device="cuda")\n')
    assert found["cause"]["name"] == "memory limit"


def test_states_of_the_optimizer_are_named_among_the_owners(project: Project) -> None:
    found = explained(
        project,
        """
        import torch
        model = torch.nn.Sequential(*[torch.nn.Linear(8192, 8192, bias=False) for _ in range(6)]).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        model(torch.randn(8, 8192, device="cuda")).sum().backward()
        optimizer.step()
        """,
    )
    assert found["capture"]["phase"] == "optimizer"
    owners = {owner["category"]: owner["size_bytes"] for owner in found["capture"]["owners"]}
    assert owners["optimizer_state"] > GIB
    assert owners["parameter"] == owners["gradient"]


def test_the_host_s_memory_is_not_the_card_s(project: Project) -> None:
    found = explained(project, "import torch\ntorch.empty(2**62, dtype=torch.uint8)\n", is_limited=False)
    assert found["cause"]["name"] == "host memory"


@pytest.mark.parametrize(
    ("attention", "changes", "room_gib", "name"),
    [
        ("eager", {"max_anchors": 128, "block_size": 16, "seq_len": 6000}, 9, "attention scores"),
        (
            "sdpa_math",
            {"chunk_blocks": 64, "max_anchors": 512},
            14,  # for copies of the keys, which are not expanded yet
            "expanded keys or values of the math path",
        ),
    ],
)
def test_a_tensor_of_the_drafter_is_named_with_its_shape(
    project: Project, attention: str, changes: dict[str, Any], room_gib: float, name: str
) -> None:
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(
        REPOSITORY / "payloads" / "dflash", project.folder / "payloads" / "dflash", ignore=ignored
    )
    known = yaml.safe_load((REPOSITORY / "experiments" / "oom_probe.yaml").read_text())
    params = {**known["params"], "attention": attention, "compile": False, "num_draft_layers": 1, **changes}
    keys = {"payload": "dflash", "run": "dflash.probes.oom", "params": params, "devices": [0]}
    path = project.folder / "experiments" / "probe.yaml"
    path.write_text(yaml.safe_dump({**keys, "memory_limit": limit_gib(room_gib)}))
    done = project.orch("run", path, "--host", "here", "--share")
    assert done.code == 1, done.err
    found = project.orch("explain", "last", "--no-estimate", "--json").json
    best = found["tensor"]["candidates"][0]
    assert name in best["name"], found["answer"]
    assert best["is_this_run"]
    assert best["confidence"] > 0.5
