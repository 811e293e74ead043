"""All processes of one run as one thing: who they are now, how they are told to end, how they are made to.

Unites the three ways to find a process of a run: descent from its supervisor, `ORCH_RUN_ID`, and the run's
cgroup. When they are told to end, and for how long they are waited for, is for others to say.
"""

import signal
from typing import List, Optional

from . import cgroups, processes

KILL_S = 5.0


class Tree:
    """The processes of ``run_id``; ``supervisor`` is its pid while it lives, ``cgroup`` a checked path."""

    def __init__(self, run_id: str, cgroup: Optional[str], supervisor: Optional[int] = None) -> None:
        self._run_id = run_id
        self._supervisor = supervisor
        self.cgroup = cgroup

    def members(self) -> List[processes.Process]:
        """Returns those that run now; neither the supervisor nor this process is among them."""
        return processes.members(self._run_id, self._supervisor, cgroups.pids(self.cgroup))

    def has_in_cgroup(self, pid: int) -> bool:
        """Tells whether the run has a cgroup and ``pid`` is in it."""
        return self.cgroup is not None and cgroups.holds(self.cgroup, pid)

    def terminate(self) -> List[processes.Process]:
        """Sends SIGTERM to all; returns who got it."""
        found = self.members()
        processes.send_signal(found, signal.SIGTERM)
        return found

    def kill(self) -> List[processes.Process]:
        """Sends SIGKILL to all; returns who got it."""
        found = self.members()
        cgroups.kill(self.cgroup)
        processes.send_signal(found, signal.SIGKILL)
        return found

    def end(self, grace_s: float) -> List[processes.Process]:
        """Ends all, with ``grace_s`` between SIGTERM and SIGKILL; returns who survived that."""
        processes.wait_for_end(self.terminate(), grace_s)
        left = processes.wait_for_end(self.kill(), KILL_S)
        if not left:
            self.forget()
        return left

    def forget(self) -> None:
        """Removes the run's cgroup, if nothing runs in it."""
        cgroups.remove(self.cgroup)
