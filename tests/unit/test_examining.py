"""Many hosts examined at once: each has its own end, in the order asked for, and none holds up the others."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from orchestrator.examining import Examined, examine
from orchestrator.finding import Level
from orchestrator.inventory import Host


@pytest.fixture
def mute(tmp_path: Path) -> Host:
    """A host whose interpreter says nothing and never ends."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 60\n")
    python.chmod(0o700)
    return Host(name="mute", transport="local", address="mute", python=str(python))


def test_a_host_that_never_answers_is_a_fault_in_its_time_and_holds_up_no_other(mute: Host) -> None:
    bad = Host(name="bad", transport="local", address="bad", python="/nowhere/python3")
    began_s = time.monotonic()
    first, second = examine([mute, bad], patience_s=1.0)
    assert time.monotonic() - began_s < 30
    assert (first.host, second.host) == ("mute", "bad")
    (reach,) = first.findings
    assert (reach.level, reach.says) == (Level.FAULT, "it did not answer within 1 s")
    assert [(one.name, one.level) for one in second.findings] == [
        ("reach", Level.OK),
        ("python", Level.FAULT),
    ]


def test_who_leaves_early_waits_for_nobody(mute: Host) -> None:
    bad = Host(name="bad", transport="local", address="bad", python="/nowhere/python3")
    began_s = time.monotonic()
    found = examine([bad, mute], patience_s=60.0)
    assert isinstance(next(found), Examined)
    found.close()
    assert time.monotonic() - began_s < 30


def test_an_ssh_config_that_cannot_be_used_is_a_fault_of_that_host(home: Path) -> None:
    (home / ".ssh").mkdir()
    (home / ".ssh" / "config").write_text("Host a\n  ProxyJump b\nHost b\n  ProxyJump a\n")
    (found,) = examine([Host(name="a", transport="ssh", address="a")])
    (reach,) = found.findings
    assert (reach.level, "go round in a circle" in reach.says) == (Level.FAULT, True)
