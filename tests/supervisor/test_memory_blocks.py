"""What the history of torch's allocator tells: which blocks live, which held the peak, and what they are."""

import unittest
from typing import Any, Dict, List

from orchestrator.supervisor import memory_blocks, memory_stacks
from orchestrator.supervisor.memory_blocks import Block
from orchestrator.supervisor.memory_names import (
    Alive,
    Described,
    Known,
    Owner,
    describe,
    sums_by_category,
    sums_by_module,
)
from tests.supervisor import snapshots
from tests.supervisor.snapshots import APPLY, CALL, MAIN, MIB, OUTER, RUNPY, STEP, Allocator, in_module

ATTEND = ("/root/.orch/runs/r/code/attention/flex.py", 61, "_attend")
SOFTMAX = (
    "/venv/lib/python3.11/site-packages/torch/_higher_order_ops/flex_attention.py",
    9,
    "math_attention",
)
LOGITS = ("/root/.orch/runs/r/code/loss.py", 201, "logits")
MLP = ("/root/.orch/runs/r/code/layers.py", 52, "forward")
UNKNOWN = Known()
LAYER = ("/root/.orch/runs/r/code/layers.py", 30, "forward")


class BlocksTest(unittest.TestCase):
    def test_live_blocks_are_told_in_both_forms_with_what_was_asked_for(self) -> None:
        allocator = Allocator()
        allocator.alloc(3 * MIB + 17, *OUTER)
        freed = allocator.alloc(MIB)
        allocator.free(freed)
        allocator.alloc(5 * MIB)
        for snapshot in (allocator.snapshot(1), snapshots.without_addresses(allocator.snapshot(1))):
            found = memory_blocks.live(snapshot, 1)
            self.assertEqual([block.requested for block in found], [3 * MIB + 17, 5 * MIB])
            self.assertEqual([block.size for block in found], [3 * MIB + 512, 5 * MIB])
            self.assertEqual([block.born for block in found], [0, 4])
            self.assertEqual([len(block.frames or ()) for block in found], [3, 0])
            self.assertEqual(memory_blocks.live(snapshot, 0), [])

    def test_a_block_whose_birth_nobody_saw_is_told_apart_from_one_born_where_no_python_ran(self) -> None:
        allocator = Allocator(most_events=1)
        allocator.alloc(MIB)
        allocator.alloc(MIB)
        before, after = memory_blocks.live(allocator.snapshot(), 0)
        self.assertIsNone(before.frames)
        self.assertEqual(after.frames, [])

    def test_what_is_reserved_and_free_counts_by_card(self) -> None:
        allocator = Allocator()
        allocator.alloc(8 * MIB)
        snapshot = allocator.snapshot(0, inactive=[2 * MIB, 3 * MIB])
        self.assertEqual(memory_blocks.reserved(snapshot, 0), 13 * MIB)
        self.assertEqual(memory_blocks.largest_free(snapshot, 0), 3 * MIB)
        self.assertEqual(memory_blocks.largest_free(snapshot, 1), 0)

    def test_the_last_refused_allocation_is_found_behind_later_events(self) -> None:
        allocator = Allocator()
        self.assertIsNone(memory_blocks.last_refused(allocator.snapshot(), 0))
        allocator.fail(7 * MIB, 1)
        allocator.fail(9 * MIB, 1)
        allocator.alloc(MIB)
        refused = memory_blocks.last_refused(allocator.snapshot(), 0)
        assert refused is not None
        self.assertEqual(refused["size"], 9 * MIB)


class PeakTest(unittest.TestCase):
    def test_the_peak_is_the_moment_when_most_was_and_has_what_was_freed_since(self) -> None:
        allocator = Allocator()
        kept = allocator.alloc(4 * MIB, *OUTER)
        gone = allocator.alloc(6 * MIB, LOGITS, *OUTER)
        shorter = allocator.alloc(5 * MIB, ATTEND, *OUTER)
        allocator.free(shorter, *OUTER)
        allocator.free(gone)
        later = allocator.alloc(2 * MIB)
        found = memory_blocks.peak(allocator.snapshot(), 0)
        self.assertEqual(found.allocated_bytes, 15 * MIB)
        told = {block.address: block for block in found.blocks}
        self.assertEqual(sorted(told), sorted([kept, gone, shorter]))
        self.assertEqual(told[gone].frames, snapshots.frames(LOGITS, *OUTER))
        self.assertEqual(told[shorter].frames, snapshots.frames(ATTEND, *OUTER))
        self.assertNotIn(later, told)

    def test_an_address_that_was_used_again_has_the_owner_of_its_time(self) -> None:
        allocator = Allocator()
        first = allocator.alloc(9 * MIB, LOGITS, *OUTER)
        allocator.free(first)
        allocator.alloc(3 * MIB, ATTEND, *OUTER, at=first)
        (block,) = memory_blocks.peak(allocator.snapshot(), 0).blocks
        self.assertEqual((block.requested, block.frames), (9 * MIB, snapshots.frames(LOGITS, *OUTER)))

    def test_the_peak_may_be_now(self) -> None:
        allocator = Allocator()
        allocator.free(allocator.alloc(MIB))
        last = allocator.alloc(8 * MIB)
        found = memory_blocks.peak(allocator.snapshot(), 0)
        self.assertEqual([block.address for block in found.blocks], [last])

    def test_of_a_history_without_its_beginning_the_rest_is_told(self) -> None:
        allocator = Allocator(most_events=3)
        old = allocator.alloc(10 * MIB, *OUTER)
        gone = allocator.alloc(20 * MIB, *OUTER)
        allocator.alloc(MIB, *OUTER)
        allocator.free(gone)
        found = memory_blocks.peak(allocator.snapshot(), 0)
        self.assertEqual(found.allocated_bytes, 31 * MIB)
        told = {block.address: block.frames for block in found.blocks}
        self.assertEqual(told[old], snapshots.frames(*OUTER))  # a live block keeps its own
        self.assertIsNone(told[gone])

    def test_a_history_that_skips_requests_to_free_is_read_by_their_completion(self) -> None:
        allocator = Allocator()
        allocator.free(allocator.alloc(9 * MIB))
        allocator.events = [event for event in allocator.events if event["action"] != "free_requested"]
        self.assertEqual(memory_blocks.peak(allocator.snapshot(), 0).allocated_bytes, 9 * MIB)


def described(size: int, *named: snapshots.Frame, known: Known = UNKNOWN) -> Described:
    (found,) = describe([Block(1, size, size, snapshots.frames(*named), 1)], known)
    return found


class CategoriesTest(unittest.TestCase):
    def test_blocks_without_an_owner_are_told_apart_by_where_they_were_born(self) -> None:
        batch = ("/root/.orch/runs/r/code/rows.py", 8, "random_row")
        triton = ("/venv/lib/python3.11/site-packages/triton/testing.py", 8, "do_benchmark")
        checkpoint = ("/venv/lib/python3.11/site-packages/torch/utils/checkpoint.py", 8, "unpack_hook")
        for expected, size, stack in (
            ("activation", MIB, in_module(MLP)),
            ("activation", MIB, OUTER),
            ("input", MIB, (batch, *OUTER)),
            ("activation", MIB, in_module(batch)),
            ("temporary", MIB, ()),
            ("temporary", MIB, (MLP, CALL, APPLY)),
            ("temporary", MIB, (MLP, checkpoint)),
            ("temporary", MIB, (snapshots.BACKWARD_CALL, *OUTER)),
            ("temporary", MIB, (snapshots.OPTIMIZER_STEP, *OUTER)),
            ("optimizer_state", MIB, (snapshots.OPTIMIZER, *OUTER)),
            ("parameter", MIB, (snapshots.MOVE, *OUTER)),
            ("scores", MIB, in_module(SOFTMAX, ATTEND)),
            ("scores", 1025 * MIB, in_module(ATTEND)),
            ("activation", MIB, in_module(ATTEND)),
            ("scores", MIB, in_module(("/code/attention/eager.py", 9, "scores"))),
            ("activation", 512 * MIB, in_module(("/code/loss/rows.py", 9, "score"))),
            ("logits", 1024 * MIB, in_module(LOGITS)),
            ("workspace", MIB, in_module(triton, MLP)),
            ("activation", MIB, in_module(("/code/benchmark.py", 9, "benchmark"))),
        ):
            with self.subTest(expected=expected, stack=stack):
                self.assertEqual(described(size, *stack).category, expected)

    def test_what_attention_makes_far_larger_than_all_else_of_its_module_is_scores(self) -> None:
        sites = {(MLP[0], "forward"): [(1, ["attention"])]}
        project = ("/root/.orch/runs/r/code/projections.py", 70, "project")
        blocks = [
            Block(number, size, size, snapshots.frames(*in_module(*stack, CALL, MLP)), number)
            for number, (size, stack) in enumerate(
                [(4 * MIB, (project,)), (8 * MIB, (ATTEND,)), (9 * MIB, (ATTEND,)), (3 * MIB, (ATTEND,))]
            )
        ]
        found = describe(blocks, Known(sites=sites))
        told = [(row.bytes // MIB, row.category, row.module) for row in found]
        self.assertEqual(told[0], (9, "scores", "attention"))
        self.assertEqual({category for _, category, _ in told[1:]}, {"activation"})

    def test_a_birth_that_nobody_saw_is_unnamed(self) -> None:
        (found,) = describe([Block(1, MIB, MIB, None, None)], Known())
        self.assertEqual((found.category, found.phase, found.where), ("unnamed", None, None))

    def test_an_owner_names_its_block_and_no_other_that_has_its_place_later(self) -> None:
        weight = Owner(MIB, "parameter", "lm_head.weight", "lm_head", (512, 1024), "bfloat16")
        found = described(MIB, *OUTER, known=Known(owners={1: weight}))
        self.assertEqual(found.as_json()["shape"], [512, 1024])
        self.assertEqual((found.category, found.name, found.module), weight[1:4])
        self.assertEqual(described(2 * MIB, *OUTER, known=Known(owners={1: weight})).name, None)
        self.assertEqual(described(MIB // 2, *OUTER, known=Known(owners={1: weight})).name, None)

    def test_rows_over_a_vocabulary_are_logits_by_their_size_alone(self) -> None:
        known = Known(vocabularies={248320: frozenset([5120])})
        rows = 4096 * 248320
        for size, expected in (
            (rows * 4, "logits"),
            (rows * 2, "logits"),
            (rows * 4 + 512, "activation"),
            (5120 * 248320 * 2, "activation"),  # a copy of the head
        ):
            self.assertEqual(described(size, *in_module(MLP), known=known).category, expected, size)
        self.assertEqual(described(rows * 4, known=known).category, "logits")  # and of their gradient
        self.assertEqual(described(5120 * 248320 * 2, *in_module(LOGITS), known=known).category, "logits")
        even = Known(vocabularies={32768: frozenset([512])})
        self.assertEqual(described(32768 * 64, *in_module(MLP), known=even).category, "activation")
        self.assertEqual(described(32768 * 64, *in_module(LOGITS), known=even).category, "logits")

    def test_a_tensor_that_lives_is_judged_by_its_shape(self) -> None:
        def category(shape: "tuple[int, ...]", *named: snapshots.Frame, requires_grad: bool = False) -> str:
            alive = {1: Alive(shape, "float32", requires_grad)}
            return described(MIB, *named, known=known._replace(alive=alive)).category

        known = Known(vocabularies={32768: frozenset([512])})
        self.assertEqual(category((8, 32768), *in_module(MLP)), "logits")
        self.assertEqual(category((512, 32768), *in_module(MLP)), "activation")
        self.assertEqual(category((32, 8192, 15447), *in_module(ATTEND)), "scores")
        self.assertEqual(category((1, 32, 8192, 128), *in_module(ATTEND)), "activation")
        self.assertEqual(category((1, 8000), *OUTER), "input")
        self.assertEqual(category((1, 8000), *OUTER, requires_grad=True), "activation")

    def test_gradients_without_an_owner_are_as_many_as_parameters_lack_one(self) -> None:
        owner = Owner(MIB, "gradient", "a", None, (1,), "float32")
        known = Known(owners={1: owner}, gradient_sizes={MIB: 2})
        found = describe([Block(number, MIB, MIB, [], number) for number in (1, 2, 3)], known)
        self.assertEqual(sums_by_category(found)[0], {"category": "gradient", "bytes": 2 * MIB, "blocks": 2})

    def test_the_oldest_blocks_of_cublas_size_are_its_workspaces(self) -> None:
        blocks = [Block(number, 32 * MIB, 32 * MIB, [], number) for number in (5, 3, 4, 1)]
        found = describe(blocks, Known())
        self.assertEqual([row["category"] for row in map(Described.as_json, found)].count("cublas"), 2)
        by_address = dict(zip([block.address for block in blocks], found))
        self.assertEqual({n for n, row in by_address.items() if row.category == "cublas"}, {1, 3})

    def test_sums_are_told_by_category_and_by_module_down_to_its_second_name(self) -> None:
        owners = {
            number: Owner(MIB, "parameter", "w", module, (1,), "float32")
            for number, module in enumerate(("layers.0.mlp", "layers.0.attention.q", "head"))
        }
        blocks = [Block(number, MIB, MIB, [], number) for number in range(4)]
        found = describe(blocks, Known(owners=owners))
        self.assertEqual(
            sums_by_category(found),
            [
                {"category": "parameter", "bytes": 3 * MIB, "blocks": 3},
                {"category": "temporary", "bytes": MIB, "blocks": 1},
            ],
        )
        self.assertEqual(
            sums_by_module(found),
            [{"module": "layers.0", "bytes": 2 * MIB}, {"module": "head", "bytes": MIB}],
        )


class StacksTest(unittest.TestCase):
    def test_a_line_is_the_payloads_innermost_and_lines_have_its_own_first(self) -> None:
        ours = ("/root/.orch/supervisor/0/supervisor/instrument.py", 3, "main")
        stack = memory_stacks.Stack(snapshots.frames(CALL, LOGITS, CALL, STEP, MAIN, RUNPY, ours), {})
        self.assertEqual(stack.where, "loss.py:201 logits")
        self.assertEqual(
            stack.lines,
            [
                "loss.py:201 logits",
                "train.py:40 step",
                "train.py:90 <module>",
                "module.py:1700 _call_impl",
                "module.py:1700 _call_impl",
            ],
        )
        self.assertEqual(memory_stacks.Stack(snapshots.frames(APPLY), {}).where, "function.py:300 apply")
        self.assertIsNone(memory_stacks.Stack([], {}).where)

    def test_torch_that_is_installed_elsewhere_is_not_the_payloads(self) -> None:
        frames = snapshots.frames(("/opt/torch/nn/functional.py", 3, "linear"), MLP)
        self.assertEqual(memory_stacks.Stack(frames, {}, "/opt/torch").where, "layers.py:52 forward")

    def test_modules_are_told_by_the_calls_that_lead_to_them(self) -> None:
        sites: Dict[Any, List[Any]] = {
            (LAYER[0], "forward"): [(25, ["layers.0", "layers.1"]), (50, ["layers.0.mlp", "layers.1.mlp"])],
            ("/l/linear.py", "forward"): [(1, ["head", "layers.0.mlp.up", "layers.1.mlp.up"])],
        }
        linear = ("/l/linear.py", 5, "forward")
        for stack, expected in (
            (in_module(linear, CALL, MLP, CALL, LAYER), "layers.*.mlp.up"),
            (in_module(MLP, CALL, LAYER), "layers.*.mlp"),
            (in_module(LAYER), "layers.*"),
            (in_module(LOGITS, CALL, LAYER), "layers.*"),
            (in_module(LOGITS), None),
        ):
            self.assertEqual(memory_stacks.Stack(snapshots.frames(*stack), sites).module, expected)

    def test_names_that_differ_are_one_pattern(self) -> None:
        for names, expected in (
            (["layers.3.mlp"], "layers.3.mlp"),
            (["layers.0.mlp", "layers.1.mlp"], "layers.*.mlp"),
            (["layers.0", "layers.0.mlp"], "layers.0.*"),
            (["head", "body"], None),
            ([""], None),
        ):
            self.assertEqual(memory_stacks.pattern(names), expected)


if __name__ == "__main__":
    unittest.main()
