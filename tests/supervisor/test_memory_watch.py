"""What instrument tells of CUDA memory: when it runs out, who held the peak, and what is left alone.

The allocator is made up; tests/gpu/test_capture.py has torch's.
"""

import json
import os
import pickle
import shutil
import stat
import subprocess
import sys
import tempfile
import textwrap
import threading
import unittest
from typing import Any, Dict, List

from orchestrator import supervisor
from orchestrator.supervisor import memory_files, memory_names, memory_watch
from tests.supervisor import snapshots
from tests.supervisor.cards import ScriptedCards
from tests.supervisor.fake_torch import TORCH
from tests.supervisor.host import HostCase, of_kind
from tests.supervisor.snapshots import MIB, Allocator

INSTRUMENT = os.path.join(os.path.dirname(supervisor.__file__), "instrument.py")
OUT_OF_MEMORY = """
    import gc, torch
    MIB = 2**20
    class Head(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self._parameters["weight"] = torch.Tensor(60 * MIB)
        def forward(self):
            return torch.Tensor(70 * MIB)
    head = Head()
    states = torch.Tensor(8 * MIB)
    """


def after_filling(code: str) -> str:
    """Returns a program that does ``code`` when most of the memory is in use."""
    return textwrap.dedent(OUT_OF_MEMORY) + textwrap.dedent(code)


class WatchCase(unittest.TestCase):
    def setUp(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="orch 'memory' ")
        self.addCleanup(shutil.rmtree, self.folder)
        self.artifacts = os.path.join(self.folder, "artifacts")
        os.mkdir(self.artifacts)
        os.mkdir(os.path.join(self.folder, "torch"))
        shutil.copy(snapshots.__file__, os.path.join(self.folder, "made_up.py"))
        self.write(os.path.join("torch", "__init__.py"), TORCH)

    def write(self, name: str, text: str) -> str:
        path = os.path.join(self.folder, name)
        with open(path, "w", encoding="utf-8") as file:
            file.write(textwrap.dedent(text))
        return path

    def told(self, code: str, expected: int = 0, **env: str) -> List[Dict[str, Any]]:
        """Runs a program under instrument; returns its events."""
        script = self.write("go.py", code)
        read, write = os.pipe()
        env = dict(
            env,
            ORCH_EVENTS_FD="%d:%d" % (write, os.fstat(write).st_ino),
            ORCH_ARTIFACTS=self.artifacts,
            CUDA_VISIBLE_DEVICES="GPU-aa",
        )
        argv = [sys.executable, "-B", INSTRUMENT, "--script", script]
        with os.fdopen(read) as events:
            program = subprocess.Popen(argv, env=env, pass_fds=[write], stderr=subprocess.PIPE)
            os.close(write)
            lines = events.readlines()
            assert program.stderr is not None
            with program.stderr as errors:
                said = errors.read().decode()
        self.assertEqual(program.wait(60), expected, said)
        self.assertTrue(all(len(line) < 60_000 for line in lines))
        return [json.loads(line) for line in lines]

    def kept(self, name: str) -> str:
        return os.path.join(self.artifacts, memory_files.FOLDER, name)


class FailureTest(WatchCase):
    def test_memory_that_runs_out_is_told_with_who_holds_it_and_the_exception_is_as_it_was(self) -> None:
        events = self.told(
            after_filling(
                """
                try:
                    head.forward()
                except torch.OutOfMemoryError as error:
                    print(error.__traceback__.tb_next.tb_frame.f_code.co_name)
                    raise
                """
            ),
            1,
        )
        self.assertEqual([e["instrument_error"] for e in events if "instrument_error" in e], [])
        (event,) = of_kind(events, "oom")
        whole = {name: event[name] for name in event if name.endswith("_bytes")}
        self.assertEqual(
            {name: size / MIB for name, size in whole.items()},
            {
                "asked_bytes": 70.0,
                "requested_bytes": 70.0,
                "limit_bytes": 100.0,
                "free_bytes": 32.0,
                "allocated_bytes": 68.0,
                "reserved_bytes": 68.0,
                "largest_free_bytes": 0.0,
            },
        )
        self.assertEqual(
            event["owners"],
            [
                {"category": "parameter", "bytes": 60 * MIB, "blocks": 1},
                {"category": "input", "bytes": 8 * MIB, "blocks": 1},
            ],
        )
        largest = event["largest"][0]
        self.assertEqual((largest["name"], largest["shape"]), ("weight", [60 * MIB]))
        self.assertEqual(largest["where"], "go.py:7 __init__")
        self.assertEqual(event["stack"][:2], ["go.py:9 forward", "go.py:14 <module>"])
        self.assertEqual((event["phase"], event["autograd_node"]), ("forward", None))
        self.assertEqual(event["snapshot"], "orch-memory/main-1.pickle")
        (exception,) = of_kind(events, "exception")
        self.assertEqual(exception["type"], "torch.OutOfMemoryError")
        self.assertEqual(exception["message"], "CUDA out of memory. Tried to allocate %d" % (70 * MIB))

    def test_analysis_and_snapshot_are_kept_for_this_user_alone(self) -> None:
        self.told(after_filling("head.forward()"), 1)
        for path, mode in ((self.kept(""), 0o700), (self.kept("main-1.json"), 0o600)):
            self.assertEqual(stat.S_IMODE(os.stat(path).st_mode), mode)
        self.assertEqual(stat.S_IMODE(os.stat(self.kept("main-1.pickle")).st_mode), 0o600)
        with open(self.kept("main-1.json"), encoding="utf-8") as file:
            analysis = json.load(file)
        self.assertEqual([block["bytes"] // MIB for block in analysis["blocks"]], [60, 8])
        self.assertEqual(analysis["event"]["snapshot"], "orch-memory/main-1.pickle")
        with open(self.kept("main-1.pickle"), "rb") as stream:
            snapshot = pickle.load(stream)  # noqa: S301  (this test's own)
        self.assertEqual(snapshot["device_traces"][0][-1]["action"], "oom")

    def test_a_program_that_goes_on_is_told_of_five_times_and_holds_nothing_longer_than_before(self) -> None:
        events = self.told(
            after_filling(
                """
                import weakref
                class Retrying(torch.nn.Module):
                    def forward(self):
                        batch = torch.Tensor(20 * MIB)
                        gone = weakref.ref(batch)
                        try:
                            torch.Tensor(70 * MIB)
                        except torch.OutOfMemoryError:
                            batch = None
                            assert gone() is None, "somebody keeps it"
                retrying = Retrying()
                for _ in range(7):
                    retrying.forward()
                """
            )
        )
        self.assertEqual([event["number"] for event in of_kind(events, "oom")], [1, 2, 3, 4, 5])
        self.assertEqual(len(os.listdir(self.kept(""))), 10)

    def test_what_is_allocated_after_each_backward_pass_is_told_of_long_runs_more_coarsely(self) -> None:
        events = self.told(
            after_filling(
                """
                kept = []
                def step():
                    kept.append(torch.Tensor(2**16))
                for _ in range(100):
                    torch.autograd.backward(step)
                head.forward()
                """
            ),
            1,
        )
        (event,) = of_kind(events, "oom")
        samples = event["after_backwards"]
        self.assertEqual(samples["stride"], 2)
        self.assertEqual(samples["bytes"], [68 * MIB + 2**16 * step for step in range(2, 101, 2)])

    def test_a_pass_within_another_as_a_reentrant_checkpoint_s_is_none_of_its_own(self) -> None:
        events = self.told(
            after_filling(
                """
                kept = []
                class node:
                    def name():
                        return "CheckpointFunctionBackward"
                def step():
                    torch.node = node
                    for _ in range(8):
                        torch.autograd.backward(lambda: kept.append(torch.Tensor(2**16)))
                    torch.node = None
                torch.autograd.backward(step)
                head.forward()
                """
            ),
            1,
        )
        (event,) = of_kind(events, "oom")
        self.assertEqual(event["after_backwards"], {"stride": 1, "bytes": [68 * MIB + 8 * 2**16]})

    def test_backward_is_told_with_autograds_node(self) -> None:
        (event,) = of_kind(
            self.told(
                after_filling(
                    """
                class node:
                    def name():
                        return "MmBackward0"
                torch.node = node
                torch.autograd.backward(head.forward)
                """
                ),
                1,
            ),
            "oom",
        )
        self.assertEqual((event["phase"], event["autograd_node"]), ("backward", "MmBackward0"))

    def test_a_rank_has_its_files_under_its_own_name(self) -> None:
        rank = {"RANK": "3", "ORCH_RUN_ID": "r", "TORCHELASTIC_RUN_ID": "r"}
        (event,) = of_kind(self.told(after_filling("head.forward()"), 1, **rank), "oom")
        self.assertEqual(event["snapshot"], "orch-memory/rank3-1.pickle")
        self.assertEqual(memory_files.process_name({"RANK": "3", "ORCH_RUN_ID": "r"}), "main")

    def test_what_cannot_be_kept_is_said_and_the_rest_is_told(self) -> None:
        os.symlink(self.folder, os.path.join(self.artifacts, memory_files.FOLDER))
        events = self.told(after_filling("head.forward()"), 1)
        self.assertIsNone(of_kind(events, "oom")[0]["snapshot"])
        said = " ".join(event.get("instrument_error", "") for event in events)
        self.assertIn("cannot keep the snapshot: NotADirectoryError", said)
        self.assertEqual([name for name in os.listdir(self.folder) if "main-" in name], [])

    def test_an_observer_that_breaks_leaves_the_payloads_exception_alone(self) -> None:
        events = self.told(
            after_filling("del torch.cuda.memory._snapshot\nhead.forward()"),
            1,
        )
        self.assertEqual(of_kind(events, "oom"), [])
        self.assertEqual(of_kind(events, "exception")[0]["type"], "torch.OutOfMemoryError")
        said = " ".join(event.get("instrument_error", "") for event in events)
        self.assertIn("cannot tell of the memory that ran out: AttributeError", said)


class HistoryTest(WatchCase):
    def test_the_history_begins_when_cuda_comes_up_and_the_peak_is_told_at_the_end(self) -> None:
        events = self.told(
            """
            import torch
            assert torch.records == []
            class Head(torch.nn.Module):
                pass
            def main():
                head = Head()
                head._parameters["weight"] = torch.Tensor(30 * 2**20)
                assert torch.records == [("all", "alloc", "python", 200_000)], torch.records
                gone = torch.Tensor(50 * 2**20)
                torch.autograd.backward(lambda: None)
            main()
            """
        )
        self.assertIn("the last 200000 events", [event.get("memory_history") for event in events])
        (event,) = of_kind(events, "memory")
        self.assertEqual((event["device"], event["is_whole"], event["reason"]), (0, True, None))
        self.assertEqual(event["peak_allocated_bytes"], 80 * MIB)
        self.assertEqual(
            event["owners"],
            [
                {"category": "activation", "bytes": 50 * MIB, "blocks": 1},
                {"category": "parameter", "bytes": 30 * MIB, "blocks": 1},
            ],
        )
        self.assertEqual(event["largest"][0]["where"], "go.py:10 main")
        self.assertEqual(event["largest"][1]["name"], "weight")

    def test_a_peak_before_the_history_is_not_whole(self) -> None:
        allocator = Allocator(most_events=4)
        allocator.free(allocator.alloc(90 * MIB))
        allocator.free(allocator.alloc(5 * MIB))
        allocator.alloc(MIB)
        card = {"index": 0, "allocated_bytes": 90 * MIB}
        for most_events, reason in (
            (4, "the peak lies before the last 4 events"),
            (None, "the peak lies before the payload's own 4 events"),
            (5, None),  # all events are there: what is missing was never told, as what cannot be split off
        ):
            event = memory_watch.peak_event(allocator.snapshot(), card, memory_names.Known(), most_events)
            self.assertEqual((event["is_whole"], event["reason"]), (reason is None, reason))
            unsplit = [owner["bytes"] for owner in event["owners"] if owner["category"] == "unsplit"]
            blocks = sum(owner["bytes"] for owner in event["owners"]) - sum(unsplit)
            self.assertEqual(unsplit, [90 * MIB - blocks] if event["is_whole"] else [])
        card["allocated_bytes"] = 5 * MIB
        event = memory_watch.peak_event(allocator.snapshot(), card, memory_names.Known(), 4)
        self.assertTrue(event["is_whole"])

    def test_an_experiment_can_switch_it_off(self) -> None:
        events = self.told(
            """
            import torch, sys
            backward = torch.autograd.backward
            torch.Tensor(8)
            assert not torch.records and not torch.observers
            assert backward.__qualname__ == "autograd.backward"
            assert not [name for name in sys.modules if "_orch" in name]
            """,
            ORCH_MEMORY_HISTORY="0",
        )
        self.assertEqual(of_kind(events, "memory"), [])
        self.assertEqual(events[0]["environment"]["ORCH_MEMORY_HISTORY"], "0")

    def test_a_torch_without_cuda_is_left_as_it_is(self) -> None:
        self.write(os.path.join("torch", "__init__.py"), TORCH.replace('cuda = "9"', "cuda = None"))
        self.told("import torch, sys\nassert not [name for name in sys.modules if '_orch' in name]\n")

    def test_a_history_that_the_payload_keeps_itself_is_left_alone(self) -> None:
        for code, calls in (
            ("torch._C._cuda_record_memory_history('mine')\ntorch.Tensor(8)", 1),
            ("torch.Tensor(8)\ntorch._C._cuda_record_memory_history('mine')", 2),
        ):
            events = self.told("import torch\n%s\nassert len(torch.records) == %d\n" % (code, calls))
            told = [event["memory_history"] for event in events if "memory_history" in event]
            self.assertEqual(told[-1], "the payload's own, left as it is")
            self.assertEqual(len(of_kind(events, "memory")), 1)

    def test_an_allocator_without_a_history_is_said(self) -> None:
        events = self.told('import torch\ntorch.backend = "cudaMallocAsync"\ntorch.Tensor(8)\n')
        told = [event["memory_history"] for event in events if "memory_history" in event]
        self.assertEqual(told, ["none: the allocator cudaMallocAsync keeps no history"])
        self.assertEqual([e for e in events if "instrument_error" in e], [])

    def test_a_torch_that_takes_other_arguments_is_said_and_goes_on(self) -> None:
        self.write(
            os.path.join("torch", "__init__.py"),
            TORCH.replace("(enabled, context, stacks, max_entries):", "(enabled):"),
        )
        events = self.told("import torch\ntorch.Tensor(8)\n")
        said = " ".join(event.get("instrument_error", "") for event in events)
        self.assertIn("cannot keep the allocator's history: TypeError", said)

    def test_a_forked_child_tells_nothing(self) -> None:
        events = self.told(
            """
            import os, sys, torch
            torch.Tensor(8)
            if os.fork() == 0:
                sys.exit(0)
            os.wait()
            """
        )
        self.assertEqual(len(of_kind(events, "memory")), 1)

    def test_a_forked_child_that_trains_on_the_cpu_is_not_looked_at(self) -> None:
        events = self.told(
            """
            import os, sys, torch
            torch.Tensor(8)
            if os.fork() == 0:
                del torch.cuda.current_device
                for _ in range(50):
                    torch.autograd.backward(lambda: None)
                sys.exit(0)
            os.wait()
            """
        )
        self.assertEqual([e for e in events if "instrument_error" in e], [])

    def test_what_cannot_be_sampled_is_said_once(self) -> None:
        events = self.told(
            """
            import torch
            torch.Tensor(8)
            del torch.cuda.current_device
            for _ in range(50):
                torch.autograd.backward(lambda: None)
            """
        )
        said = [event["instrument_error"] for event in events if "instrument_error" in event]
        self.assertEqual(len(said), 1, said)
        self.assertIn("cannot see how much is allocated", said[0])


class FilesTest(WatchCase):
    def test_a_snapshot_that_is_too_large_keeps_the_last_of_its_history(self) -> None:
        self.set_most(800_000)
        events = [{"action": "alloc", "addr": number, "size": number} for number in range(100_000)]
        snapshot = {"segments": [], "device_traces": [events]}
        files = memory_files.MemoryFiles(self.artifacts, "main")
        self.assertEqual(files.write_snapshot(1, snapshot, float("inf")), "orch-memory/main-1.pickle")
        with open(self.kept("main-1.pickle"), "rb") as stream:
            kept = pickle.load(stream)["device_traces"][0]  # noqa: S301
        self.assertEqual((len(kept), kept[-1]["addr"]), (memory_files.MOST_EVENTS_AT_LEAST, 99_999))

    def test_what_does_not_fit_or_comes_too_late_leaves_nothing(self) -> None:
        files = memory_files.MemoryFiles(self.artifacts, "main")
        with self.assertRaises(memory_files.TooLate):
            files.write_snapshot(1, {"segments": []}, 0.0)
        self.set_most(10)
        with self.assertRaises(memory_files.TooMuch):
            files.write_snapshot(2, {"segments": ["x" * 100]}, float("inf"))
        self.assertEqual(os.listdir(self.kept("")), [])

    def set_most(self, size: int) -> None:
        before = memory_files.MOST_SNAPSHOT_BYTES
        self.addCleanup(setattr, memory_files, "MOST_SNAPSHOT_BYTES", before)
        memory_files.MOST_SNAPSHOT_BYTES = size


class EventTest(unittest.TestCase):
    def test_an_event_waits_until_the_pipe_is_empty_and_not_for_ever(self) -> None:
        told: List[str] = []
        read, write = os.pipe()
        nobody: Any = None
        watch = memory_watch.MemoryWatch(
            None, nobody, lambda kind, **_: told.append(kind), lambda: write, None
        )
        self.addCleanup(setattr, memory_watch, "LEAST_PATIENCE_S", memory_watch.LEAST_PATIENCE_S)
        memory_watch.LEAST_PATIENCE_S = 0.0
        os.write(write, b"a line that nobody has read")
        watch._tell("oom", {}, 0.0)
        self.assertEqual(told, [])
        reader = threading.Timer(0.05, os.read, (read, 100))
        reader.start()
        watch._tell("oom", {}, 30.0)
        reader.join()
        self.assertEqual(told, ["oom"])
        for fd in (read, write):
            os.close(fd)

    def test_an_event_is_made_to_fit_what_a_supervisor_takes(self) -> None:
        name = "ä" * 300
        row = {"name": name, "where": name}
        event = {"largest": [row] * 25, "modules": [row] * 20, "processes": [row] * 32, "stack": [name] * 16}
        fitted = memory_watch.fitted(event)
        self.assertLess(len(json.dumps(fitted)), memory_watch.MOST_EVENT_BYTES)
        self.assertTrue(fitted["largest"] or fitted["stack"])
        self.assertEqual(memory_watch.fitted({"largest": [row]}), {"largest": [row]})


class HostTest(HostCase):
    def test_what_a_run_tells_stands_in_its_records_and_its_files_in_its_artifacts(self) -> None:
        with open(snapshots.__file__, encoding="utf-8") as file:
            made_up = file.read()
        code = "import importlib, sys\n"
        for name, text in (("made_up", made_up), ("torch", textwrap.dedent(TORCH))):
            code += "with open(%r, 'w') as file:\n    file.write(%r)\n" % (name + ".py", text)
        code += "importlib.invalidate_caches()\n" + after_filling("head.forward()")
        cards = ScriptedCards(os.path.join(self.base, "tools"), 1)
        talk = self.start(code, host_env=cards.env, devices=["0"])
        records = self.records(talk)
        told = [record["event"] for record in of_kind(records, "event")]
        (event,) = of_kind(told, "oom")
        self.assertEqual(event["owners"][0]["category"], "parameter")
        self.assertEqual(len(of_kind(told, "memory")), 1)
        kept = self.path(self.run_ids[0], "artifacts", "orch-memory")
        self.assertEqual(sorted(os.listdir(kept)), ["main-1.json", "main-1.pickle"])


if __name__ == "__main__":
    unittest.main()
