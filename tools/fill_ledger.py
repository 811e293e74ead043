"""Fills a ledger with runs that have all ended, for measuring commands on a long history.

    python tools/fill_ledger.py HOME COUNT [HOST]

HOME is what ORCH_HOME names. Jobs are as large as those of experiments/oom_probe.yaml.
"""

import sys
import time
from pathlib import Path

from orchestrator.ledger import Ledger, RunRow
from orchestrator.lifecycle import State

PER_TRANSACTION = 10_000


def row(number: int, host: str, now_t: float, count: int) -> RunRow:
    """Returns one run of a history that ends now."""
    created_t = now_t - 60.0 * (count - number)
    run_id = f"r{number:011}"
    return RunRow(
        run_id=run_id,
        group_id=run_id,
        experiment="oom_probe",
        host=host,
        bundle=f"{number % 100:064x}",
        commit_id=f"{number % 1000:040x}",
        state=State.SUCCEEDED,
        verdict="ok",
        exit_code=0,
        created_t=created_t,
        started_t=created_t + 1,
        ended_t=created_t + 50,
        pid=4242,
        job={
            "run_id": run_id,
            "module": "dflash.probes.oom",
            "params": {f"parameter_{index}": index for index in range(30)},
            "env": {},
            "alloc_conf": "expandable_segments:True",
            "devices": ["0"],
            "expect": {"verdicts": ["ok"], "metrics": {}},
        },
    )


def main(home: Path, count: int, host: str) -> None:
    """Adds ``count`` runs to the ledger of ``home``."""
    now_t = time.time()
    with Ledger.open(home / "ledger.db") as ledger:
        for start in range(0, count, PER_TRANSACTION):
            numbers = range(start, min(start + PER_TRANSACTION, count))
            ledger.insert(*(row(number, host, now_t, count) for number in numbers))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else "local")
