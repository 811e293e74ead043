"""What a payload gets from its supervisor, and what it tells it: environment, parameters, facts, events."""

import json
import os
import time
import unittest

from tests.supervisor.host import HostCase, of_kind, stream_bytes

# PID 1 of a namespace of its own has these variables, and what is started there has not.
CONTAINER = (
    *("unshare", "--pid", "--fork", "--mount-proc", "env"),
    *("IMAGE_SAYS=from the image", "IMAGE_TOKEN=never recorded", "MODE=the image's"),
    *("sh", "-c", 'env -u IMAGE_SAYS -u IMAGE_TOKEN -u MODE "$@"; exit', "sh"),
)


class EnvironmentTest(HostCase):
    maxDiff = None

    def test_the_payload_gets_the_stated_environment_and_nothing_else(self) -> None:
        records = self.run_code(
            "import os, json; print(json.dumps(dict(os.environ)))",
            env={"MINE": "a b\n$(id)", "PYTHONUNBUFFERED": "0"},
            alloc_conf="expandable_segments:True",
        )
        got = json.loads(stream_bytes(records, "stdout"))
        got.pop("LC_CTYPE", None)  # Python sets it itself under the C locale
        base = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "TZ", "TMPDIR")
        stated = {name: os.environ[name] for name in base if name in os.environ}
        run_id = self.run_ids[0]
        stated.update(
            MINE="a b\n$(id)",
            PYTHONUNBUFFERED="0",
            PYTHONFAULTHANDLER="1",
            PYTHONDONTWRITEBYTECODE="1",
            CUDA_MODULE_LOADING="LAZY",
            CUDA_DEVICE_ORDER="PCI_BUS_ID",
            CUDA_VISIBLE_DEVICES="",
            PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True",
            PYTHONPATH=os.path.join(os.path.realpath(self.root), "runs", run_id, "code"),
            ORCH_RUN_ID=run_id,
            ORCH_ARTIFACTS=os.path.join(os.path.realpath(self.root), "runs", run_id, "artifacts"),
            ORCH_EVENTS_FD=got["ORCH_EVENTS_FD"],
        )
        self.assertEqual(got, stated)
        spawn = of_kind(records, "spawn")[0]
        self.assertEqual({name: spawn["env"][name] for name in stated}, stated)

    def test_a_variable_of_the_controller_or_the_shell_does_not_leak(self) -> None:
        env = dict(os.environ, LEAKED_VARIABLE="s3cret", PYTORCH_ALLOC_CONF="backend:cudaMallocAsync")
        records = self.records(self.start("import os; print(sorted(os.environ))", host_env=env))
        self.assertNotIn("LEAKED_VARIABLE", json.dumps(records))
        self.assertNotIn("'PYTORCH_ALLOC_CONF'", json.dumps(of_kind(records, "out")))

    @unittest.skipUnless(os.geteuid() == 0, "a PID namespace needs root")
    def test_the_environment_of_a_containers_first_process_is_imported_when_asked(self) -> None:
        names = ["IMAGE_SAYS", "IMAGE_TOKEN", "MODE", "HOME"]
        code = "import os; print([os.environ.get(name) for name in %r])" % names
        for asked, expected in ((True, "from the image"), (False, None)):
            records = self.records(
                self.start(code, prefix=CONTAINER, env={"MODE": "the run's"}, import_container_env=asked)
            )
            home = os.environ["HOME"]
            printed = "".join(record["text"] for record in of_kind(records, "out"))
            self.assertEqual(printed, "%r\n" % [expected, None, "the run's", home])
            spawn = of_kind(records, "spawn")[0]
            self.assertEqual(spawn["env"].get("IMAGE_SAYS"), expected)
            self.assertEqual("IMAGE_TOKEN" in spawn["not_imported"], asked)
            self.assertNotIn("never recorded", json.dumps(records))

    def test_a_virtual_environment_comes_first_and_the_runs_own_path_before_all(self) -> None:
        code = "import json, os; print(json.dumps([os.environ['PATH'], os.environ.get('VIRTUAL_ENV')]))"
        path = os.environ["PATH"]
        for asked, expected in (
            ({"venv": "/a venv"}, ["/a venv/bin:" + path, "/a venv"]),
            ({"venv": "~/v"}, [os.environ["HOME"] + "/v/bin:" + path, os.environ["HOME"] + "/v"]),
            ({"venv": "/a venv", "env": {"PATH": "/mine"}}, ["/mine", "/a venv"]),
            ({}, [path, None]),
        ):
            records = self.run_code(code, **asked)
            self.assertEqual(json.loads(stream_bytes(records, "stdout")), expected)

    def test_the_working_folder_is_the_hosts_or_the_runs_own(self) -> None:
        code = "import os; print(os.getcwd())"
        folder = os.path.realpath(self.root)
        records = self.run_code(code, workdir=folder)
        self.assertEqual(stream_bytes(records, "stdout").decode(), folder + "\n")
        self.assertEqual(of_kind(records, "spawn")[0]["cwd"], folder)
        own = self.run_code(code)
        self.assertIn("/runs/%s/" % self.run_ids[-1], stream_bytes(own, "stdout").decode())

    def test_a_working_folder_that_is_not_there_is_refused_by_name(self) -> None:
        records = self.run_code("print('ran')", workdir="/nowhere at all")
        end = of_kind(records, "end")[0]
        self.assertEqual(end["outcome"], "refused")
        self.assertIn("/nowhere at all", end["reason"])
        self.assertEqual(of_kind(records, "out"), [])

    def test_a_variable_that_the_process_changed_before_it_was_read_is_a_mismatch(self) -> None:
        """What instrument reports is compared with what was asked for."""
        records = self.run_code(
            """
            import json, os
            fake = {"kind": "facts", "environment": {"PYTORCH_CUDA_ALLOC_CONF": "other:1"}}
            os.write(int(os.environ["ORCH_EVENTS_FD"].split(":")[0]), json.dumps(fake).encode() + b"\\n")
            """,
            alloc_conf="expandable_segments:True",
        )
        found = [text for record in of_kind(records, "facts") for text in record["mismatches"]]
        self.assertEqual(len(found), 1)
        self.assertIn("PYTORCH_CUDA_ALLOC_CONF", found[0])

    def test_params_arrive_as_a_file_and_the_module_runs_as_main(self) -> None:
        records = self.run_code(
            """
            import json, sys
            assert __name__ == "__main__"
            params = json.load(open(sys.argv[sys.argv.index("--params") + 1]))
            print(params["answer"], sys.argv[1:2], sys.path[0] != "")
            """
        )
        self.assertEqual(stream_bytes(records, "stdout"), b"42 ['--params'] True\n")

    def test_supervisor_modules_are_not_importable_by_the_payload(self) -> None:
        records = self.run_code(
            """
            import importlib
            for name in ("wire", "records", "job", "supervisor", "instrument"):
                try:
                    importlib.import_module(name)
                    print("leaked", name)
                except ImportError:
                    pass
            """
        )
        self.assertEqual(stream_bytes(records, "stdout"), b"")

    def test_every_file_is_private(self) -> None:
        self.run_code("open('artifact', 'w').write('x')")
        self.assertTrue(os.path.exists(self.path(self.run_ids[0], "artifacts", "artifact")))
        for folder, folders, names in os.walk(self.root):
            for name in folders + names:
                mode = os.lstat(os.path.join(folder, name)).st_mode
                self.assertEqual(mode & 0o077, 0, os.path.join(folder, name))


class EventTest(HostCase):
    def test_metrics_become_records_and_bad_events_are_kept_as_such(self) -> None:
        records = self.run_code(
            """
            import os
            fd = int(os.environ["ORCH_EVENTS_FD"].split(":")[0])
            os.write(fd, b'{"kind":"metric","name":"loss","value":1.5}\\nnot json\\n')
            os.write(fd, b'{"kind":"metric","name":"nan","value":NaN}\\n')
            """
        )
        events = [record["event"] for record in of_kind(records, "event")]
        self.assertEqual(events[0], {"kind": "metric", "name": "loss", "value": 1.5})
        self.assertEqual(events[1]["value"], "NaN")
        self.assertEqual(of_kind(records, "event_refused")[0]["head"], "not json")

    def test_nothing_that_a_payload_writes_there_ends_its_run(self) -> None:
        records = self.run_code(
            """
            import os
            fd = int(os.environ["ORCH_EVENTS_FD"].split(":")[0])
            for line in (
                b'{"kind":"metric","name":"x","value":1e999}',
                b'{"kind":"phase","name":"\\udcff"}',
                b"[" * 50000,
                b'{"kind":"facts","devices":[1],"environment":3,"allocator":[],"allocator_settings":7}',
                b'{"kind":"exception"}',
                b'{"kind":"facts","allocator":"native","allocator_settings":'
                b'{"garbage_collection_threshold":1' + b"0" * 400 + b"}}",
                b"x" * 70000,
            ):
                os.write(fd, line + b"\\n")
            os.write(fd, b'{"kind":"phase","name":"last"}\\n')
            """,
            alloc_conf="garbage_collection_threshold:0.8",
        )
        self.assertEqual(
            (of_kind(records, "end")[0]["outcome"], of_kind(records, "end")[0]["code"]), ("exited", 0)
        )
        names = [record["event"]["name"] for record in of_kind(records, "event")]
        self.assertEqual(names, ["\udcff", "last"])
        self.assertGreaterEqual(len(of_kind(records, "event_refused")), 3)

    def test_a_flood_of_events_does_not_delay_the_timeout(self) -> None:
        started = time.monotonic()
        records = self.run_code(
            """
            import os, threading
            fd = int(os.environ["ORCH_EVENTS_FD"].split(":")[0])
            def flood():
                while True:
                    os.write(fd, b'{"kind":"phase","name":"x"}\\n' * 100)
            [threading.Thread(target=flood).start() for _ in range(2)]
            """,
            timeout_s=1.0,
            grace_s=0.5,
        )
        self.assertEqual(of_kind(records, "end")[0]["outcome"], "timeout")
        self.assertLess(time.monotonic() - started, 20)

    def test_a_process_that_did_not_inherit_the_descriptor_cannot_write_to_its_number(self) -> None:
        records = self.run_code(
            """
            import os, subprocess, sys
            number = int(os.environ["ORCH_EVENTS_FD"].split(":")[0])
            data = os.open("data", os.O_RDWR | os.O_CREAT, 0o600)
            os.dup2(data, number)
            raise RuntimeError("reported by instrument")
            """
        )
        with open(self.path(self.run_ids[0], "artifacts", "data"), "rb") as file:
            self.assertEqual(file.read(), b"")
        self.assertEqual(of_kind(records, "exception"), [])

    def test_looking_for_torch_without_importing_it_does_not_end_the_watch(self) -> None:
        records = self.run_code(
            """
            import importlib.util, os, sys
            folder = os.getcwd()
            os.makedirs("torch")
            with open("torch/__init__.py", "w") as file:
                file.write(
                    "__version__ = '9.9'\\n"
                    "class version: cuda = None\\n"
                    "class _C: pass\\n"
                    "class cuda:\\n"
                    "    _lazy_call = staticmethod(lambda call: None)\\n"
                    "    is_initialized = staticmethod(lambda: False)\\n"
                )
            importlib.invalidate_caches()
            assert importlib.util.find_spec("torch")
            assert importlib.util.find_spec("torch")
            import torch
            """
        )
        self.assertEqual([fact["torch"] for fact in of_kind(records, "facts") if "torch" in fact], ["9.9"])

    def test_peak_memory_is_the_whole_runs_although_the_payload_counts_anew_in_between(self) -> None:
        records = self.run_code(
            """
            import importlib, os, textwrap
            FAKE = '''
                __version__ = "9.9"
                peaks = {0: [700, 900], 1: [0, 0], 2: [5, 6]}
                class version:
                    cuda = None
                class _C:
                    def _cuda_resetPeakMemoryStats(index):
                        peaks[index] = [3, 4]
                class cuda:
                    _lazy_call = staticmethod(lambda call: None)
                    is_initialized = staticmethod(lambda: True)
                    device_count = staticmethod(lambda: 3)
                    max_memory_allocated = staticmethod(lambda index: peaks[index][0])
                    max_memory_reserved = staticmethod(lambda index: peaks[index][1])
                '''
            os.makedirs("torch")
            with open("torch/__init__.py", "w") as file:
                file.write(textwrap.dedent(FAKE))
            importlib.invalidate_caches()
            import torch
            torch._C._cuda_resetPeakMemoryStats(0)
            torch.peaks[0][0] = 701
            torch._C._cuda_resetPeakMemoryStats(0)
            assert torch.peaks[0] == [3, 4]
            """
        )
        highest = {"index": 0, "allocated_bytes": 701, "reserved_bytes": 900}
        never_reset = {"index": 2, "allocated_bytes": 5, "reserved_bytes": 6}
        peaks = [fact["peak_memory"] for fact in of_kind(records, "facts") if "peak_memory" in fact]
        self.assertEqual(peaks, [[highest, never_reset]])

    def test_a_missing_module_and_an_exception_are_named(self) -> None:
        records = self.run_code("import no_such_module_here")
        found = of_kind(records, "exception")[0]
        self.assertEqual(found["missing_module"], "no_such_module_here")
        self.assertEqual(of_kind(records, "end")[0]["code"], 1)
        self.assertIn(b"ModuleNotFoundError", stream_bytes(records, "stderr"))
        records = self.run_code(
            "class OutOfMemoryError(RuntimeError): pass\nraise OutOfMemoryError('Tried 2 GiB')"
        )
        found = of_kind(records, "exception")[0]
        self.assertEqual((found["type"], found["message"]), ("__main__.OutOfMemoryError", "Tried 2 GiB"))


if __name__ == "__main__":
    unittest.main()
