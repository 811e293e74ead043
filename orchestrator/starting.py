"""Starts a run: the plan, the ledger row, then the host; a start that breaks off is taken up or called off.

A plan comes from an experiment, or from a run: what that one was asked to do, once more. What it needs and
its host lacks is prepared there by runs of their own, for which it waits there.

While a run is being started its folder is marked, so that no other command judges it; a cancel that comes
meanwhile is kept and carried out as soon as the host has the run. Many runs at once are `submitting`'s.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from orchestrator import remote
from orchestrator.bundle import (
    Bundle,
    Provenance,
    build_bundle,
    build_script_bundle,
    empty_bundle,
    find_payload,
)
from orchestrator.conversation import Conversation, Cursor
from orchestrator.errors import (
    OrchError,
    RecordsAltered,
    StorageError,
    UnknownName,
    Unreachable,
    UsageError,
)
from orchestrator.experiment import Experiment
from orchestrator.fields import Secret
from orchestrator.following import Following, Watcher
from orchestrator.host_starter import HostStarter, NeverStarted
from orchestrator.inventory import Host
from orchestrator.job import job_for, secrets_of, secrets_of_job, setup_text
from orchestrator.ledger import MASK, RunRow
from orchestrator.lifecycle import State
from orchestrator.mirror_reader import recorded_job
from orchestrator.run_folder import RunFolder
from orchestrator.setups import preparing_job, specs_of
from orchestrator.text import did_you_mean
from orchestrator.transports import Transport
from orchestrator.workspace import Workspace

RUN_ID_LETTERS = "abcdefghjkmnpqrstvwxyz0123456789"
RUN_ID_LENGTH = 12
MOST_NAMED = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A run that could be launched: nothing of it is anywhere but in the local object store.

    Of its ``secrets`` it knows where to read them, not their values. ``preparers``: the runs that prepare
    what it needs, None where the host shall say whether it is there.
    """

    job: dict[str, Any]
    bundle: Bundle
    host: Host
    secrets: tuple[Secret, ...]
    preparers: tuple[str, ...] | None = None


def prepare(workspace: Workspace, experiment: Experiment, host: Host) -> Plan:
    """Bundles the payload and puts the job together; reads and hashes, starts nothing.

    Raises:
        UsageError: no such payload, or one that the bundling rules refuse.
    """
    bundle = bundle_of(workspace, experiment)
    setup = specs_of(workspace.project, workspace.store, host, experiment)
    job = job_for(new_id(), experiment, bundle, host, setup=setup)
    return Plan(job=job, bundle=bundle, host=host, secrets=secrets_of(experiment, host))


def bundle_of(workspace: Workspace, experiment: Experiment) -> Bundle:
    """Bundles what the experiment's program needs: its payload, its one file, or nothing.

    Raises:
        UsageError: no such payload, one that the bundling rules refuse, or one without the program.
    """
    if experiment.payload is not None:
        bundle = build_bundle(find_payload(workspace.project, experiment.payload), workspace.store)
        _check_program(bundle, experiment)
        return bundle
    if experiment.script is not None:
        return build_script_bundle(experiment.path, workspace.store)
    return empty_bundle(workspace.store)


def prepare_again(workspace: Workspace, run_id: str, host: Host) -> Plan:
    """Puts together what a run did once more: the same bundle and the same job, by a new id.

    The job is taken as its host got it: what the inventory says of variables today does not come in. A run
    of a group stays in it, and takes no turn in its queue.

    Raises:
        UsageError: the values of its variables are kept nowhere; or its job came from its host, and names
            variables of this environment as secrets: they would go there at that host's word.
        StorageError: the object store lacks some of its code; the message names the files.
        RecordsAltered: what is here of it is not what it was.
    """
    row = workspace.ledger.get(run_id)
    job = original_job(workspace, run_id)
    if job is None:
        raise UsageError(_why_not_again(row))
    if row.is_adopted and job.get("secrets"):
        named = ", ".join(sorted(job["secrets"].values()))
        raise UsageError(
            f"run {run_id} was found on {row.host}, and its job there asks for {named} of this environment: "
            f"nobody here said that this host may have it{_instead(row)}"
        )
    again_id = new_id()
    group_id = again_id if job["group_id"] == run_id else job["group_id"]
    again = {**job, "run_id": again_id, "group_id": group_id, "retry_of": run_id, "turn": None}
    bundle = _bundle_again(workspace, row)
    return Plan(job=again, bundle=bundle, host=host, secrets=secrets_of_job(job))


def original_job(workspace: Workspace, run_id: str) -> dict[str, Any] | None:
    """Returns a run's job with the values of its variables, from its first record; None where that is not
    here and the job has variables, which the ledger masks.

    Raises:
        RecordsAltered: the records are not what was sealed, or hold another job than the ledger.
    """
    kept = workspace.ledger.get(run_id).job
    job = recorded_job(workspace.folder(run_id))
    if job is None:
        return None if kept["env"] else kept
    env = job.get("env")
    if not isinstance(env, dict) or {**job, "env": dict.fromkeys(env, MASK)} != kept:
        raise RecordsAltered(f"run {run_id}: its first record holds another job than the ledger")
    return job


def launch(
    workspace: Workspace, plan: Plan, watcher: Watcher, *, is_followed: bool = True
) -> Following | None:
    """Starts a planned run on its host, and returns its follow, or None when it is not to be followed.

    Raises:
        UsageError: a secret is not in this environment, or is none that can be masked.
        HostError: the run did not start there; after `Unreachable` and `ProtocolError` it may have: the row
            says starting, and any later command finds out.
    """
    run_id, folder = plan.job["run_id"], workspace.folder(plan.job["run_id"])
    secret_env = read_secrets(plan.secrets)
    starter, preparers = HostStarter(plan.host, workspace.store), plan.preparers

    def unreachable(error: Unreachable, pause_s: float) -> None:
        folder.observe("unreachable", message=str(error))
        watcher.unreachable(str(error), pause_s)

    def ask_for(
        asked: Plan, cursor: Cursor | None, preparers: tuple[str, ...] | None
    ) -> tuple[remote.Started, Conversation]:
        return starter.start(asked.job, asked.bundle, cursor, secret_env, unreachable, preparers)

    with folder.starting():
        workspace.ledger.insert(row_of(plan))
        note_created(folder, plan)
        workspace.ledger.update(run_id, state=State.STARTING)
        try:
            cursor = Cursor() if is_followed else None
            try:
                started, talk = ask_for(plan, cursor, preparers)
            except remote.NotPrepared as lacking:
                preparers = _launch_preparations(workspace, plan, lacking.places, ask_for, watcher)
                started, talk = ask_for(plan, cursor, preparers)
        except NeverStarted as error:
            starter.close()
            refuse(workspace, run_id, str(error.cause))
            raise error.cause from None
        except OrchError as error:
            starter.close()
            folder.observe("unreachable", message=str(error))
            workspace.ledger.update(run_id, reason=str(error))
            raise
        note_started(folder, plan.host, started, talk)
        job = plan.job
        has_to_wait = preparers or job["devices"] or job.get("setup") or job.get("prepares")
        (workspace.ledger.mark_queued if has_to_wait else workspace.ledger.mark_running)(run_id)
        watcher.shipped(started)
    transport = starter.transport
    assert transport is not None
    carry_out_cancel(transport, folder)
    if is_followed:
        return Following(folder, plan.host, talk, transport)
    talk.close()
    transport.close()
    return None


def plan_setup(
    workspace: Workspace, host: Host, experiment: Experiment | None, *, force: bool
) -> Plan | None:
    """Returns a plan for `plan_preparation`, not to be launched: it needs what a host's runs need, and those
    of ``experiment``; None when that is nothing. ``force``: even what is there is to be made again.

    Raises:
        UsageError: a file is not there, or cannot be shipped.
    """
    specs = specs_of(workspace.project, workspace.store, host, experiment)
    if not specs:
        return None
    needing = experiment or Experiment(name=host.name, path=workspace.inventory.path, prepares=specs[0])
    bundle = empty_bundle(workspace.store)
    setup = [{**spec, "force": True} for spec in specs] if force else specs
    job = {**job_for(new_id(), needing, bundle, host, setup=setup), "group_id": None}
    return Plan(job=job, bundle=bundle, host=host, secrets=secrets_of(needing, host))


def plan_preparation(workspace: Workspace, plan: Plan, place: int, preparers: tuple[str, ...]) -> Plan:
    """Returns the run that prepares one thing of what ``plan`` needs, upon what ``preparers`` prepare.

    Raises:
        StorageError: the object store lacks some of its files.
    """
    bundle_id = plan.job["setup"][place]["bundle"]
    try:
        bundle = workspace.store.load_manifest(bundle_id)
    except UnknownName as error:
        raise StorageError(f"{setup_text(plan.job['setup'][place])} cannot be prepared: {error}") from error
    workspace.store.save_manifest(bundle)  # it is in use again
    job = preparing_job(new_id(), plan.job, place, bundle, plan.host)
    return Plan(job=job, bundle=bundle, host=plan.host, secrets=plan.secrets, preparers=preparers)


def _launch_preparations(
    workspace: Workspace,
    plan: Plan,
    places: Sequence[int],
    start: Callable[[Plan, Cursor | None, tuple[str, ...] | None], tuple[remote.Started, Conversation]],
    watcher: Watcher,
) -> tuple[str, ...]:
    """Starts a run for each thing that ``plan`` lacks, over the same connection; returns their ids."""
    preparers: tuple[str, ...] = ()
    for place in places:
        try:
            preparation = plan_preparation(workspace, plan, place, preparers)
        except StorageError as error:
            raise NeverStarted(error) from error
        run_id = preparation.job["run_id"]
        folder = workspace.folder(run_id)
        with folder.starting():
            workspace.ledger.insert(row_of(preparation, State.STARTING))
            note_created(folder, preparation)
            try:
                started, talk = start(preparation, None, preparers)
            except NeverStarted as error:
                refuse(workspace, run_id, str(error.cause))
                raise
            talk.close()
            note_started(folder, plan.host, started, talk)
            workspace.ledger.mark_queued(run_id)
        preparers = (*preparers, run_id)
        watcher.preparing(run_id, setup_text(plan.job["setup"][place]))
    return preparers


def note_started(folder: RunFolder, host: Host, started: remote.Started, talk: Conversation) -> None:
    """Writes down what the host said of itself when it had started a run."""
    folder.observe("started", is_new=started.is_new, sent_files=started.sent_files, hello=dict(talk.hello))
    if talk.clock is not None:
        folder.observe("clock", host=host.name, **talk.clock.noted())


def carry_out_cancel(transport: Transport, folder: RunFolder) -> None:
    """Ends a run that its host has, where somebody asked for that while it was being started.

    Raises:
        HostError: the host cannot be asked; the word stays for the next who can.
    """
    request = folder.cancel_request
    if request is not None:
        remote.stop(transport, folder.run_id, request["grace_s"])
        folder.drop_cancel_request()


def read_secrets(secrets: Sequence[Secret]) -> dict[str, str]:
    """Returns the values of a run's secrets, which are kept nowhere.

    Raises:
        UsageError: one is not in this environment, or cannot be masked.
    """
    return {secret.name: secret.read(os.environ) for secret in secrets}


def note_created(folder: RunFolder, plan: Plan) -> None:
    """Writes down what is about to be launched, of its variables the names."""
    folder.observe("created", host=plan.host.name, job={**plan.job, "env": sorted(plan.job["env"])})


def refuse(workspace: Workspace, run_id: str, reason: str) -> None:
    """Writes down that a host did not take a run."""
    workspace.ledger.update(
        run_id, state=State.REFUSED, verdict="refused", reason=reason, ended_t=time.time()
    )
    workspace.folder(run_id).observe("verdict", state="refused", verdict="refused", reasons=[reason])


def _why_not_again(row: RunRow) -> str:
    names = ", ".join(sorted(row.job["env"]))
    return (
        f"run {row.run_id} cannot be run again from what is here: none of its records holds the values of "
        f"its variables ({names}), and the ledger keeps their names alone{_instead(row)}"
    )


def _instead(row: RunRow) -> str:
    commit = "" if row.commit_id is None else f" at commit {row.commit_id[:12]}"
    return f". Next: `orch run` its experiment, {row.experiment}{commit}"


def _bundle_again(workspace: Workspace, row: RunRow) -> Bundle:
    try:
        bundle = workspace.store.load_manifest(row.bundle)
    except UnknownName as error:
        raise StorageError(f"run {row.run_id} cannot be run again: {error}{_instead(row)}") from error
    faults = {}
    for entry in bundle.entries:
        try:
            workspace.store.open_checked(entry.sha256).close()
        except StorageError as error:
            faults[entry.path] = str(error)
    if faults:
        named = "; ".join(f"{path}: {fault}" for path, fault in list(faults.items())[:MOST_NAMED])
        raise StorageError(
            f"run {row.run_id} cannot be run again: {len(faults)} of {len(bundle.entries)} files of bundle "
            f"{bundle.id[:12]} are not in the object store as they were: {named}{_instead(row)}"
        )
    workspace.store.save_manifest(bundle)  # it is in use again
    return replace(bundle, provenance=Provenance(**row.job["provenance"]))


def _check_program(bundle: Bundle, experiment: Experiment) -> None:
    names = {entry.path for entry in bundle.entries}
    if experiment.module is None:
        if experiment.script not in names:
            raise UsageError(f"{experiment.path}: the bundling rules leave it out of its payload")
        return
    path = experiment.module.replace(".", "/")
    if not names & {f"{path}.py", f"{path}/__main__.py"}:
        modules = {name.removesuffix(".py").replace("/", ".") for name in names if name.endswith(".py")}
        hint = did_you_mean(experiment.module, modules)
        raise UnknownName(f"{experiment.name}: the payload has no module {experiment.module!r}{hint}")


def new_id() -> str:
    """Returns a fresh run id: a letter first, no letters that look like digits."""
    first = secrets.choice(RUN_ID_LETTERS[:22])
    return first + "".join(secrets.choice(RUN_ID_LETTERS) for _ in range(RUN_ID_LENGTH - 1))


def row_of(plan: Plan, state: State = State.CREATED) -> RunRow:
    """Returns the ledger's row of a run that is about to be launched."""
    job = plan.job
    return RunRow(
        run_id=job["run_id"],
        group_id=job["group_id"],
        retry_of=job.get("retry_of"),
        experiment=job["experiment"],
        profile=job["profile"],
        host=plan.host.name,
        bundle=plan.bundle.id,
        commit_id=plan.bundle.provenance.commit,
        dirty=plan.bundle.provenance.dirty,
        state=state,
        created_t=time.time(),
        job=job,
    )
