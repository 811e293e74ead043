"""What a run may execute besides a module: a script of its bundle, and any command as it is."""

import json
import os
import sys
import unittest
from typing import Any, Dict, List

from orchestrator.supervisor import store
from tests.supervisor.host import HostCase, of_kind, stream_bytes


class ScriptTest(HostCase):
    def run_script(self, code: str, *args: str) -> List[Dict[str, Any]]:
        return self.run_code(code, module=None, script="probe/go.py", args=args)

    def test_it_finds_itself_and_its_arguments_as_python_would_have_it(self) -> None:
        code = """
            import json, sys
            names = (__name__, __file__, sys.argv, sys.path[0], sys.modules["__main__"].__dict__ is globals())
            print(json.dumps(names))
            """
        got = json.loads(stream_bytes(self.run_script(code, "--lr", "1e-3", "a b", "*", ""), "stdout"))
        path = os.path.join(os.path.realpath(self.root), "runs", self.run_ids[0], "code", "probe", "go.py")
        argv = [path, "--lr", "1e-3", "a b", "*", ""]
        self.assertEqual(got, ["__main__", path, argv, os.path.dirname(path), True])

    def test_it_is_watched_from_inside_as_a_module_is(self) -> None:
        records = self.run_script(
            "import os\nassert os.path.basename(os.getcwd()) == 'artifacts'\nimport no_such_module"
        )
        self.assertEqual(of_kind(records, "facts")[0]["python"], sys.version.split()[0])
        self.assertEqual(of_kind(records, "exception")[0]["missing_module"], "no_such_module")
        self.assertEqual(of_kind(records, "end")[0]["code"], 1)
        self.assertEqual(of_kind(self.run_script("raise SystemExit(5)"), "end")[0]["code"], 5)

    def test_it_can_start_processes_that_run_its_own_functions(self) -> None:
        code = """
            import multiprocessing
            def square(x):
                return x * x
            if __name__ == "__main__":
                with multiprocessing.get_context("spawn").Pool(1) as pool:
                    print(pool.map(square, [2, 3]))
            """
        self.assertEqual(stream_bytes(self.run_script(code), "stdout"), b"[4, 9]\n")

    def test_one_that_is_not_in_the_bundle_is_refused(self) -> None:
        for script in ("probe/other.py", "../../../job.json", "/etc/hostname"):
            records = self.run_code("", module=None, script=script)
            end = of_kind(records, "end")[0]
            self.assertEqual((end["outcome"], of_kind(records, "spawn")), ("refused", []))
            self.assertIn(script, end["reason"])


class ModuleTest(HostCase):
    def test_its_arguments_stand_before_its_parameters(self) -> None:
        code = """
            import json, sys
            print(json.dumps([sys.argv[1:-1], json.load(open(sys.argv[-1]))]))
            """
        records = self.run_code(code, args=["--card", "$(id) *"], params={"n": 1})
        got = json.loads(stream_bytes(records, "stdout"))
        self.assertEqual(got, [["--card", "$(id) *", "--params"], {"n": 1}])


class CommandTest(HostCase):
    def run_command(self, *command: str, **changes: Any) -> List[Dict[str, Any]]:
        job, _, _ = self.job("", module=None, command=list(command), **changes)
        job["bundle"] = store.manifest_id([])
        return self.records(self.start_job(job, [], {}))

    def test_it_gets_its_arguments_as_they_are_and_no_shell(self) -> None:
        records = self.run_command("printf", "%s|", "$HOME", "a b", "*", "'", "\n", "")
        self.assertEqual(stream_bytes(records, "stdout"), b"$HOME|a b|*|'|\n||")
        spawn = of_kind(records, "spawn")[0]
        self.assertEqual(spawn["argv"], ["printf", "%s|", "$HOME", "a b", "*", "'", "\n", ""])
        self.assertEqual(of_kind(records, "facts"), [])
        self.assertEqual(of_kind(self.run_command("sh", "-c", "exit 7"), "end")[0]["code"], 7)

    def test_it_is_looked_for_in_the_payloads_own_path(self) -> None:
        tools = os.path.join(self.base, "tools")
        os.mkdir(tools)
        tool = os.path.join(tools, "only-there")
        with open(tool, "w", encoding="utf-8") as file:
            file.write("#!/bin/sh\necho found $1\n")
        os.chmod(tool, 0o755)
        records = self.run_command("only-there", "it", env={"PATH": tools + ":/usr/bin:/bin"})
        self.assertEqual(stream_bytes(records, "stdout"), b"found it\n")

    def test_one_that_is_not_there_or_is_no_program_is_refused_by_name(self) -> None:
        for command, env in (
            ("no-such-program", {"PATH": "/nowhere"}),
            ("/no/such/program", {}),
            ("/etc/hostname", {}),
        ):
            records = self.run_command(command, env=env)
            end = of_kind(records, "end")[0]
            self.assertEqual((end["outcome"], of_kind(records, "spawn")), ("refused", []))
            self.assertIn(command, end["reason"])
            if env:
                self.assertIn("/nowhere", end["reason"])

    def test_a_job_names_one_program(self) -> None:
        job, entries, _ = self.job("")
        changes: List[Dict[str, Any]] = [
            {"module": None},
            {"command": ["true"]},
            {"script": "probe/go.py"},
            {"module": None, "command": []},
        ]
        for change in changes:
            talk = self.talk({"op": "start", "job": {**job, **change}, "entries": entries, "cursor": None})
            self.assertEqual(talk.header()["error"], "refused", change)
        self.assertFalse(os.path.exists(self.path(job["run_id"])))


if __name__ == "__main__":
    unittest.main()
