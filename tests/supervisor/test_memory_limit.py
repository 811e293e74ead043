"""A card that is made to look smaller: what instrument does to torch's allocator, and what it says of it."""

import json
import os
import subprocess
import sys
import tempfile
import textwrap
import unittest
from typing import Any, Dict, List

from orchestrator import supervisor
from orchestrator.supervisor import environment, program
from orchestrator.supervisor.gpus import Card
from tests.supervisor.cards import ScriptedCards
from tests.supervisor.host import HostCase, of_kind

GIB = 1024**3
INSTRUMENT = os.path.join(os.path.dirname(supervisor.__file__), "instrument.py")
# Two cards of 80 GiB, on which the context of a process that looks at them takes half a GiB.
TORCH = """
    import os
    __version__ = "9.9"
    GIB = 1024**3
    total = 80 * GIB
    in_use = {0: 0, 1: 0}
    looked_at = set()
    fractions = {}
    waiting = []
    is_up = False
    class version:
        cuda = "9"
    class _C:
        def _cuda_setMemoryFraction(fraction, index):
            assert type(fraction) is float and 0 <= fraction <= 1
            fractions[index] = fraction
    class _Properties:
        name, uuid, total_memory = "NVIDIA Fake", "aa", total
    def _peak(index):
        return in_use[index]
    class cuda:
        def _lazy_call(call):
            waiting.append(call)
        def is_initialized():
            return is_up
        def device_count():
            return 2
        def get_device_properties(index):
            return _Properties
        def mem_get_info(index):
            looked_at.add(index)
            return total - in_use[index] - GIB // 2, total
        def memory_reserved(index):
            return 0
        def set_per_process_memory_fraction(fraction, index):
            _C._cuda_setMemoryFraction(fraction, index)
        def get_per_process_memory_fraction(index):
            return fractions.get(index, 1.0)
        max_memory_allocated = max_memory_reserved = _peak
    def init():
        global is_up
        for call in waiting:
            call()
        is_up = True
    def share(index):
        return fractions.get(index, 1.0) * total / GIB
    """


class InstrumentTest(unittest.TestCase):
    def setUp(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        os.mkdir(os.path.join(self.folder.name, "torch"))
        self.write(os.path.join("torch", "__init__.py"), TORCH)

    def write(self, name: str, text: str) -> str:
        path = os.path.join(self.folder.name, name)
        with open(path, "w", encoding="utf-8") as file:
            file.write(textwrap.dedent(text))
        return path

    def facts(self, code: str, limit_gib: float, **env: str) -> List[Dict[str, Any]]:
        """Runs a program under instrument; returns what it said of the limit."""
        script = self.write("go.py", code)
        read, write = os.pipe()
        env = dict(env, ORCH_EVENTS_FD="%d:%d" % (write, os.fstat(write).st_ino))
        env["ORCH_MEMORY_LIMIT_BYTES"] = str(int(limit_gib * GIB))
        argv = [sys.executable, "-B", INSTRUMENT, "--script", script]
        with os.fdopen(read) as events:
            try:
                subprocess.run(argv, env=env, pass_fds=[write], check=True, timeout=60)
            finally:
                os.close(write)
            told = [json.loads(line) for line in events]
        self.assertEqual(
            [fact["instrument_error"] for fact in told if "memory" in fact.get("instrument_error", "")], []
        )
        return [card for fact in told for card in fact.get("memory_limit", [])]

    def test_every_card_is_limited_before_the_program_has_anything_there_and_by_what_others_have(
        self,
    ) -> None:
        told = self.facts(
            """
            import torch
            torch.in_use[1] = 3 * torch.GIB
            torch.init()
            assert [torch.share(index) for index in (0, 1)] == [23.5, 20.5], torch.fractions
            """,
            24,
        )
        limits = [(card["index"], card["limit_bytes"] / GIB, card["allocator_bytes"] / GIB) for card in told]
        self.assertEqual(limits, [(0, 24.0, 23.5), (1, 24.0, 20.5)])
        self.assertEqual(environment.mismatches(asked(24), {"memory_limit": told}), [])

    def test_the_program_can_take_less_and_never_more(self) -> None:
        self.facts(
            """
            import torch
            torch.init()
            torch.cuda.set_per_process_memory_fraction(1.0, 0)
            assert torch.share(0) == 23.5
            torch.cuda.set_per_process_memory_fraction(0.1, 0)
            assert torch.share(0) == 8.0
            """,
            24,
        )

    def test_a_smaller_share_that_the_allocators_settings_ask_for_stays(self) -> None:
        told = self.facts(
            "import torch\ntorch.fractions[0] = 0.1\ntorch.init()\nassert torch.share(0) == 8\n", 24
        )
        self.assertEqual([card["allocator_bytes"] / GIB for card in told], [8.0, 23.5])

    def test_a_limit_that_no_card_can_be_held_to_is_a_mismatch(self) -> None:
        told = self.facts("import torch\ntorch.init()\nassert not torch.fractions\n", 81)
        self.assertEqual(
            environment.mismatches(asked(81), {"memory_limit": told}),
            [
                "memory limit: asked for 81.00 GiB, cuda:%d has 80.00 GiB, it is not limited" % n
                for n in (0, 1)
            ],
        )

    def test_a_limit_below_what_others_have_leaves_nothing_and_is_a_mismatch(self) -> None:
        told = self.facts(
            "import torch\ntorch.in_use[0] = 24 * torch.GIB\ntorch.init()\nassert torch.share(0) == 0\n", 24
        )
        found = environment.mismatches(asked(24), {"memory_limit": told})
        self.assertEqual(len(found), 1)
        self.assertRegex(found[0], "cuda:0 has 24.50 GiB in use outside this process.s allocator")

    def test_a_rank_takes_memory_on_its_own_card_alone_and_says_when_it_used_another(self) -> None:
        code = (
            "import torch\ntorch.init()\nassert torch.looked_at == {1}\nassert list(torch.fractions) == [1]\n"
        )
        told = self.facts(code, 24, LOCAL_RANK="1")
        self.assertEqual([card["index"] for card in told], [1])
        told = self.facts(code + "torch.in_use[0] = 7\n", 24, LOCAL_RANK="1")
        self.assertEqual(
            environment.mismatches(asked(24), {"memory_limit": told}),
            ["memory limit: asked for 24.00 GiB, cuda:0 was used without a limit"],
        )

    def test_another_limit_than_the_one_asked_for_is_a_mismatch(self) -> None:
        told = [{"index": 0, "limit_bytes": 5, "allocator_bytes": 5, "problem": None}]
        self.assertEqual(
            environment.mismatches(asked(24), {"memory_limit": told}),
            ["memory limit: asked for 24.00 GiB, cuda:0 is kept to 5 bytes"],
        )


class HostTest(HostCase):
    def test_a_limit_arrives_in_the_process_and_its_report_in_the_records(self) -> None:
        code = """
            import importlib, os
            os.makedirs("torch")
            with open("torch/__init__.py", "w") as file:
                file.write(%r)
            importlib.invalidate_caches()
            import torch
            torch.init()
            """
        cards = ScriptedCards(os.path.join(self.base, "tools"), 1)
        talk = self.start(
            code % textwrap.dedent(TORCH), host_env=cards.env, devices=["0"], memory_limit_bytes=24 * GIB
        )
        records = self.records(talk)
        self.assertEqual(of_kind(records, "end")[0]["code"], 0, records)
        told = [card for fact in of_kind(records, "facts") for card in fact.get("memory_limit", [])]
        self.assertEqual([card["allocator_bytes"] / GIB for card in told], [23.5, 23.5])
        wrong = [text for fact in of_kind(records, "facts") for text in fact.get("mismatches", [])]
        self.assertEqual([text for text in wrong if "emory" in text or "LIMIT" in text], [])

    def test_what_shows_before_a_start_is_refused_there(self) -> None:
        card = Card(3, "GPU-aa", "NVIDIA Fake", 81920, 0)
        unknown = card._replace(total_mib=0)
        for job, cards, says in (
            (
                {"memory_limit_bytes": 81 * GIB},
                [card],
                "81.00 GiB cannot be simulated on card 3.*80.00 GiB",
            ),
            ({"memory_limit_bytes": GIB}, [], "needs a card for each process: there are 0 for 1"),
            ({"memory_limit_bytes": GIB, "processes": 2}, [card], "there are 1 for 2"),
        ):
            with self.assertRaisesRegex(program.Refused, says):
                program.check_cards(job, cards)
        program.check_cards({"memory_limit_bytes": 81 * GIB}, [unknown])
        program.check_cards({"memory_limit_bytes": GIB, "processes": 2}, [card, card])
        program.check_cards({"memory_limit_bytes": None}, [])


def asked(limit_gib: int) -> Dict[str, str]:
    """Returns what a process was asked to be."""
    return {"ORCH_MEMORY_LIMIT_BYTES": str(limit_gib * GIB)}


if __name__ == "__main__":
    unittest.main()
