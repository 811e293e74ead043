"""What a host says of a run that does not simply run: its supervisor is stopped, the host was rebooted."""

import json
import os
import signal
import unittest
from typing import Any, Dict

from tests.supervisor.host import HostCase

NAP = "import os, time; os.write(1, b'up\\n'); time.sleep(100)"
OTHER_BOOT = (
    "unshare",
    "-m",
    "sh",
    "-c",
    'mount --bind "$0" /proc/sys/kernel/random/boot_id && exec "$@"',
)


class StandingTest(HostCase):
    def test_a_supervisor_that_runs_is_neither_silent_nor_stopped(self) -> None:
        self.start(NAP).follow().until_printed(b"up")
        standing = self.standing(self.run_ids[0])
        told = [standing[name] for name in ("alive", "waiting", "stopped", "rebooted", "orphans")]
        self.assertEqual(told, [True, False, False, False, []])
        self.assertLess(standing["silent_s"], 20.0)

    def test_one_that_is_stopped_is_told_and_goes_on_later(self) -> None:
        talk = self.start("import time; print('up', flush=True); time.sleep(2.0)")
        follow = talk.follow()
        follow.until_printed(b"up")
        pid = self.supervisor(self.run_ids[0])
        os.kill(pid, signal.SIGSTOP)
        self.wait_for("its stop", lambda: self.standing(self.run_ids[0])["stopped"])
        self.assertTrue(self.standing(self.run_ids[0])["alive"])
        self.wait_for("silence", lambda: self.standing(self.run_ids[0])["silent_s"] > 1.0)
        os.kill(pid, signal.SIGCONT)
        self.wait_for("its going on", lambda: not self.standing(self.run_ids[0])["stopped"])
        self.assertEqual(follow.until("end")["outcome"], "exited")
        follow.rest()
        self.wait_for("its end", lambda: not self.standing(self.run_ids[0])["alive"])
        self.assertIsNone(self.standing(self.run_ids[0])["silent_s"])

    def test_a_stop_reaches_one_that_is_stopped(self) -> None:
        follow = self.start(NAP).follow()
        follow.until_printed(b"up")
        run_id = self.run_ids[0]
        os.kill(self.supervisor(run_id), signal.SIGSTOP)
        self.wait_for("its stop", lambda: self.standing(run_id)["stopped"])
        self.assertTrue(self.talk({"op": "stop", "run": run_id, "grace_s": 0.0}).header()["asked"])
        self.assertEqual(follow.until("end")["outcome"], "cancelled")

    def test_a_run_of_an_earlier_boot_is_told_and_has_no_processes(self) -> None:
        follow = self.start(NAP).follow()
        follow.until_printed(b"up")
        run_id = self.run_ids[0]
        state = self.state(run_id)
        os.kill(state["identity"]["pid"], signal.SIGKILL)
        self.wait_for("the supervisor's end", lambda: not self.standing(run_id)["alive"])
        self.assertFalse(self.standing(run_id)["rebooted"])
        self.assertEqual(len(self.standing(run_id)["orphans"]), 1)
        # A container that is started anew has its node's boot id and another process 1.
        for name, other in (("boot_id", "0" * len(state["identity"]["boot_id"])), ("init_started", -1)):
            self.write_state(run_id, dict(state, identity=dict(state["identity"], **{name: other})))
            standing = self.standing(run_id)
            self.assertEqual(
                (standing["alive"], standing["rebooted"], standing["orphans"]), (False, True, [])
            )
        for unknown in (None, state["identity"]["init_started"]):
            self.write_state(run_id, dict(state, identity=dict(state["identity"], init_started=unknown)))
            self.assertFalse(self.standing(run_id)["rebooted"])

    def write_state(self, run_id: str, state: Dict[str, Any]) -> None:
        with open(self.path(run_id, "state.json"), "w", encoding="utf-8") as file:
            json.dump(state, file)

    @unittest.skipUnless(os.geteuid() == 0, "a mount namespace needs root")
    def test_the_boot_id_is_the_kernels(self) -> None:
        self.start("print('x')").follow().rest()
        other = os.path.join(self.base, "boot_id")
        with open(other, "w", encoding="utf-8") as file:
            file.write("11111111-2222-3333-4444-555555555555\n")
        talk = self.talk({"op": "status", "runs": self.run_ids}, prefix=(*OTHER_BOOT, other))
        self.assertTrue(talk.header()["runs"][self.run_ids[0]]["rebooted"])
        self.assertFalse(self.standing(self.run_ids[0])["rebooted"])


if __name__ == "__main__":
    unittest.main()
