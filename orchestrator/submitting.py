"""Starts many runs as one group: all rows first, then each host's runs in their order over one connection.

Hosts are served side by side, each by a thread that touches no ledger. A host that fails one start gets no
more; the others go on. Runs that were not submitted when this process dies are found by any later command, as
one that broke off is: their host knows nothing of them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from queue import SimpleQueue

from orchestrator.errors import OrchError, Unreachable
from orchestrator.experiment import Experiment
from orchestrator.host_starter import HostStarter, NeverStarted
from orchestrator.inventory import Host
from orchestrator.job import Turn, job_for, secrets_of
from orchestrator.lifecycle import State
from orchestrator.remote import NotPrepared
from orchestrator.run_folder import starting_together
from orchestrator.setups import specs_of
from orchestrator.starting import (
    Plan,
    bundle_of,
    carry_out_cancel,
    new_id,
    note_created,
    note_started,
    plan_preparation,
    read_secrets,
    refuse,
    row_of,
)
from orchestrator.workspace import Workspace

GROUP_PREFIX = "g-"  # no run id holds a dash: a group is told from a run at sight
JOIN_S = 5.0
MOST_ASKED_AT_ONCE = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Submission:
    """What became of one start: its host has it, or ``refusal`` says why not, or ``doubt`` why it may."""

    plan: Plan
    sent_files: int = 0
    refusal: str | None = None
    doubt: str | None = None


def prepare_group(workspace: Workspace, experiment: Experiment, hosts: Sequence[Host]) -> tuple[Plan, ...]:
    """Returns a plan for every case on every host, host by host; reads and hashes, starts nothing.

    Raises:
        UsageError: as `starting.prepare`.
    """
    bundle, group_id = bundle_of(workspace, experiment), f"{GROUP_PREFIX}{new_id()}"
    at_once = 1 if experiment.matrix is None else experiment.matrix.at_once
    setups = {host.name: specs_of(workspace.project, workspace.store, host, experiment) for host in hosts}
    return tuple(
        Plan(
            job=job_for(
                new_id(), case, bundle, host, Turn(group_id, place, at_once), setup=setups[host.name]
            ),
            bundle=bundle,
            host=host,
            secrets=secrets_of(case, host),
        )
        for host in hosts
        for place, case in enumerate(experiment.cases())
    )


def submit(workspace: Workspace, plans: Sequence[Plan]) -> Iterator[Submission]:
    """Launches a group's plans; yields what became of each as it is known and written down.

    Leaving early stops submitting, not the runs that were submitted.

    Raises:
        UsageError: a secret is not in this environment; nothing was started.
    """
    secret_env = {plan.job["run_id"]: read_secrets(plan.secrets) for plan in plans}
    folders = [workspace.folder(plan.job["run_id"]) for plan in plans]
    with starting_together(folders):
        workspace.ledger.insert(*(row_of(plan, State.STARTING) for plan in plans))
        for plan, folder in zip(plans, folders, strict=True):
            note_created(folder, plan)
        by_host: dict[str, list[Plan]] = {}
        for plan in plans:
            by_host.setdefault(plan.host.name, []).append(plan)
        results: SimpleQueue[Submission] = SimpleQueue()
        threads = [_HostThread(workspace, mine, secret_env, results) for mine in by_host.values()]
        try:
            for thread in threads:
                thread.start()
            for _ in plans:
                submission = results.get()
                _write_down(workspace, submission)
                yield submission
        finally:
            for thread in threads:
                thread.leave()
            for thread in threads:
                if thread.is_alive():
                    thread.join(JOIN_S)


def with_preparations(workspace: Workspace, plans: Sequence[Plan]) -> Sequence[Plan]:
    """Returns a group's plans with, before those of each host, what it takes to prepare there what they need.

    Asks the hosts, unless nothing is needed. Of one that cannot be asked it is not known: should it answer
    later after all, it refuses runs that lack something.
    """
    if not any(plan.job["setup"] for plan in plans):
        return plans
    by_host: dict[str, list[Plan]] = {}
    for plan in plans:
        by_host.setdefault(plan.host.name, []).append(plan)
    from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415  (slow to import, and seldom needed)

    firsts = [mine[0] for mine in by_host.values()]
    starters = [HostStarter(plan.host, workspace.store) for plan in firsts]
    with ThreadPoolExecutor(MOST_ASKED_AT_ONCE) as pool:
        try:
            found = list(pool.map(_lacking_places, starters, firsts))
        finally:  # who leaves early waits for no host: the pool waits for its threads
            for starter in starters:
                starter.close()
    every: list[Plan] = []
    for mine, places in zip(by_host.values(), found, strict=True):
        if places is None:
            every += mine
            continue
        preparers: tuple[str, ...] = ()
        for place in places:
            preparation = plan_preparation(workspace, mine[0], place, preparers)
            preparers = (*preparers, preparation.job["run_id"])
            every.append(preparation)
        every += [replace(plan, preparers=preparers) for plan in mine]
    return every


def _lacking_places(starter: HostStarter, plan: Plan) -> list[int] | None:
    if not plan.job["setup"]:
        return []
    try:
        found = starter.prepared(plan.job["setup"])
    except OrchError:
        return None
    return [place for place, environment in enumerate(found) if environment.made_by is None]


class _HostThread(threading.Thread):
    """Submits the runs of one host in their order."""

    def __init__(
        self,
        workspace: Workspace,
        plans: Sequence[Plan],
        secret_env: Mapping[str, Mapping[str, str]],
        results: SimpleQueue[Submission],
    ) -> None:
        super().__init__(name=f"orch-submit-{plans[0].host.name}", daemon=True)
        self._workspace = workspace
        self._plans = plans
        self._secret_env = secret_env
        self._results = results
        self._starter = HostStarter(plans[0].host, workspace.store)
        self._is_leaving = False

    def leave(self) -> None:
        """Has the thread end, wherever it is, and closes the connection."""
        self._is_leaving = True
        self._starter.close()

    def run(self) -> None:
        """Runs in the thread; after a failure the host's other runs are refused for the same reason."""
        failure: str | None = None
        with self._starter:
            for plan in self._plans:
                if self._is_leaving:
                    return
                if failure is not None:
                    self._results.put(Submission(plan=plan, refusal=failure))
                    continue
                folder = self._workspace.folder(plan.job["run_id"])
                if folder.cancel_request is not None:
                    folder.drop_cancel_request()
                    self._results.put(Submission(plan=plan, refusal="cancelled before it was submitted"))
                    continue
                submission = self._submit(plan)
                failure = submission.refusal or submission.doubt
                self._results.put(submission)

    def _submit(self, plan: Plan) -> Submission:
        run_id = plan.job["run_id"]
        folder = self._workspace.folder(run_id)
        try:
            started, talk = self._starter.start(
                plan.job, plan.bundle, None, self._secret_env[run_id], self._unreachable, plan.preparers
            )
            talk.close()
            note_started(folder, plan.host, started, talk)
            folder.end_starting()
            if self._starter.transport is not None:
                carry_out_cancel(self._starter.transport, folder)
        except NeverStarted as error:
            return Submission(plan=plan, refusal=str(error.cause))
        except NotPrepared:
            name = plan.host.name
            text = f"{name}: what it needs is not prepared there. Next: orch prepare {name}"
            return Submission(plan=plan, refusal=text)
        except OrchError as error:
            return Submission(plan=plan, doubt=str(error))
        except Exception as error:  # noqa: BLE001  (a thread's error must reach the caller)
            return Submission(plan=plan, doubt=f"the start failed: {type(error).__name__}: {error}")
        return Submission(plan=plan, sent_files=started.sent_files)

    def _unreachable(self, error: Unreachable, _pause_s: float) -> None:
        if self._is_leaving:
            raise error


def _write_down(workspace: Workspace, submission: Submission) -> None:
    run_id = submission.plan.job["run_id"]
    folder = workspace.folder(run_id)
    if submission.refusal is not None:
        refuse(workspace, run_id, submission.refusal)
    elif submission.doubt is not None:
        folder.observe("unreachable", message=submission.doubt)
        workspace.ledger.update(run_id, reason=submission.doubt)
    else:
        workspace.ledger.mark_queued(run_id)
    folder.end_starting()
