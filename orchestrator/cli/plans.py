"""What would run, as text and as JSON values: for ``--dry-run`` and the first line of a run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from orchestrator.bundle import Bundle
from orchestrator.fields import devices_text
from orchestrator.job import program_of, setup_text
from orchestrator.starting import Plan
from orchestrator.text import counted, printable
from orchestrator.views import short_commit

SHOWN_NAMES = 3


def bundle_line(bundle: Bundle) -> str:
    """Returns id, size, what was left out and the commit."""
    if not bundle.entries:
        return "no code is sent"
    names = ", ".join(
        (*bundle.excluded[:SHOWN_NAMES], *(["…"] if len(bundle.excluded) > SHOWN_NAMES else []))
    )
    excluded = f"; left out by rule: {names}" if names else ""
    commit = short_commit(bundle.provenance.commit, is_dirty=bundle.provenance.dirty)
    size = f"{counted(len(bundle.entries), 'file')}, {counted(bundle.size_bytes, 'byte')}{excluded}"
    return f"bundle {bundle.id[:12]} ({size}), commit {commit}"


def plan_text(plan: Plan) -> str:
    """Returns one plan, a fact a line."""
    return _lines({"host": _host(plan), **_facts(plan)})


def group_text(plans: Sequence[Plan]) -> str:
    """Returns the plans of a group: what they share, and a line for each."""
    first, facts = plans[0], [_facts(plan) for plan in plans]
    shared = {name: value for name, value in facts[0].items() if all(fact[name] == value for fact in facts)}
    hosts = list(dict.fromkeys(map(_host, plans)))
    cases = [f"  {plan.host.name}: {plan.job['case'] or plan.job['experiment']}" for plan in plans]
    turn = first.job["turn"]
    counted = f"{len(plans)} on {len(hosts)} host{'s' * (len(hosts) > 1)}, {turn['at_once']} at once on each"
    return "\n".join((_lines({"hosts": "; ".join(hosts), **shared, "runs": counted}), *map(printable, cases)))


def plan_json(plan: Plan) -> dict[str, Any]:
    """Returns one plan with every file that it ships."""
    return {"host": plan.host.name, "bundle": _bundle_json(plan.bundle), "job": plan.job}


def group_plan_json(plans: Sequence[Plan]) -> dict[str, Any]:
    """Returns the plans of a group, whose bundle is one."""
    return {
        "group_id": plans[0].job["group_id"],
        "bundle": _bundle_json(plans[0].bundle),
        "runs": [{"host": plan.host.name, "job": plan.job} for plan in plans],
    }


def _host(plan: Plan) -> str:
    return f"{plan.host.name}, {plan.host.python}, root {plan.host.root}"


def _facts(plan: Plan) -> dict[str, str]:
    job, expect = plan.job, plan.job["expect"]
    program = program_of(job)
    limit = job["log_limit_bytes"]
    facts = {
        program.kind: program.text,
        "bundle": bundle_line(plan.bundle).removeprefix("bundle "),
        "setup": ", ".join(map(setup_text, job["setup"])) or "none",
        "allocator": job["alloc_conf"] or "nothing asked",
        "devices": devices_text(job["devices"]),
        "processes": str(job["processes"]),
        "memory": "the card's" if job["memory_limit_bytes"] is None else f"{job['memory_limit_bytes']} bytes",
        "variables": ", ".join(sorted(job["env"])) or "none",
        "secrets": ", ".join(f"{name} from {source}" for name, source in job["secrets"].items()) or "none",
        "timeout": "none" if job["timeout_s"] is None else f"{job['timeout_s']:g} s",
        "grace": f"{job['grace_s']:g} s",
        "disk full": job["on_disk_full"],
        "log limit": "none" if limit is None else f"{limit} bytes",
        "collected": f"{', '.join(job['collect'])}, {job['collect_limit_bytes']} bytes at most"
        if job["collect"]
        else "nothing",
        "expected": f"verdict {' or '.join(expect['verdicts'])}, metrics {json.dumps(expect['metrics'])}",
    }
    return facts | ({"parameters": json.dumps(job["params"])} if program.kind == "module" else {})


def _lines(facts: dict[str, str]) -> str:
    return "\n".join(printable(f"{label:11} {value}") for label, value in facts.items())


def _bundle_json(bundle: Bundle) -> dict[str, Any]:
    files = [
        {"path": entry.path, "size_bytes": entry.size_bytes, "sha256": entry.sha256}
        for entry in bundle.entries
    ]
    return {"id": bundle.id, "files": files, "excluded": list(bundle.excluded)}
