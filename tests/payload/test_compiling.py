"""Compiled functions: one graph serves lengths that change, and no two are compiled at the same time.

Tracing, guards and what happens to arguments are torch's own; graphs are run and not made into kernels.
"""

import functools
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from dflash import drafter, notices, pointwise
from dflash.compiling import RECOMPILE_LIMIT, Compiled
from dflash.execution import Execution
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func

from tests.payload.cases import Case, build, gradients_of, relative_error

ALWAYS = {"normalize", "normalize_backward", "norm_rotate", "norm_rotate_backward", "swiglu"}
KEPT, AGAIN = {"swiglu_backward_"}, {"swiglu_", "swiglu_backward_in_place_"}
BY_POLICY = {"none": ALWAYS | KEPT, "mlp": ALWAYS | AGAIN, "layer": ALWAYS | AGAIN}
LOSS = {"scale_rows"}  # compiled for a card only
SEVERAL = replace(Case(), lengths=(40, 25), padding=3, anchors=None, max_anchors=9)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The functions that were compiled, one entry a graph; every pointwise part is compiled."""
    made: list[str] = []

    def compiler(name: str, graph: Any, _inputs: Any) -> Callable[..., Any]:
        made.append(name)
        run: Callable[..., Any] = make_boxed_func(graph.forward)
        return run

    compiled: Any = functools.partial(torch.compile)
    functions = {name: value for name, value in vars(pointwise).items() if isinstance(value, Compiled)}
    assert set(functions) == ALWAYS | KEPT | AGAIN | LOSS
    for name, function in functions.items():
        backend = aot_autograd(fw_compiler=functools.partial(compiler, name))
        with monkeypatch.context() as patch:
            patch.setattr(torch, "compile", functools.partial(compiled, backend=backend))
            replacement = Compiled(function.plain)
            assert callable(replacement._compiled)  # made here, with this backend
        monkeypatch.setattr(pointwise, name, replacement)
    monkeypatch.setattr(
        drafter,
        "choose_execution",
        lambda config, **_: Execution(attention=config.attention, is_compiled=True, chunk_blocks=8),
    )
    torch.compiler.reset()
    yield made
    torch.compiler.reset()


@pytest.mark.parametrize("recompute", BY_POLICY)
def test_fifty_rows_of_differing_lengths_need_a_handful_of_graphs(graphs: list[str], recompute: str) -> None:
    counts = []
    for number in range(50):
        lengths = (11 + (7 * number) % 53, 5 + (3 * number) % 29)
        case = replace(SEVERAL, lengths=lengths, max_anchors=2 + number % 9, recompute=recompute)
        bench = build(replace(case, attention="sdpa_chunked", dtype=torch.float32))
        torch.autograd.backward(bench.run(seed=number)[0])
        counts.append(len(graphs))
    assert set(graphs) == BY_POLICY[recompute]
    # Compiled for one length, then for all; queries and keys of `norm_rotate` begin at different rows.
    assert max(Counter(graphs).values()) <= 4
    assert counts[-1] == counts[9]


@pytest.mark.parametrize("recompute", BY_POLICY)
def test_compiled_parts_change_no_gradient(graphs: list[str], recompute: str) -> None:
    case = replace(SEVERAL, anchors=(2, 9, 41, 60), attention="eager", recompute=recompute)
    found = build(case)
    torch.autograd.backward(found.run()[0])
    assert set(graphs) == BY_POLICY[recompute]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            drafter,
            "choose_execution",
            lambda config, **_: Execution(attention=config.attention, is_compiled=False, chunk_blocks=8),
        )
        plain = build(case)
        torch.autograd.backward(plain.run()[0])
    expected = gradients_of(plain.drafter)
    for name, gradient in gradients_of(found.drafter).items():
        assert relative_error(gradient, expected[name]) < 1e-12, name


class Alone:
    """Notes whether two threads are ever inside at once."""

    def __init__(self) -> None:
        self.entered: list[str] = []
        self.most = 0
        self._inside = 0

    def work(self, name: str) -> None:
        self._inside += 1
        self.most = max(self.most, self._inside)
        self.entered.append(name)
        time.sleep(0.05)
        self._inside -= 1


def alone_backend(alone: Alone) -> Any:
    """A compiler whose work, and whose graphs' first runs, can be seen; torch guards neither with a lock."""

    def compiler(name: str, graph: Any, _inputs: Any) -> Callable[..., Any]:
        alone.work(f"compile {name}")
        first: list[bool] = []

        def run(*arguments: Any) -> Any:
            if not first:
                first.append(True)
                if name == "forward":
                    alone.work("first run")
            return graph(*arguments)

        boxed: Callable[..., Any] = make_boxed_func(run)
        return boxed

    return aot_autograd(
        fw_compiler=functools.partial(compiler, "forward"),
        bw_compiler=functools.partial(compiler, "backward"),
    )


def test_threads_never_compile_nor_run_first_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = Alone()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=alone_backend(alone)))
    functions = [Compiled(lambda x: x * 2), Compiled(lambda x: x * x + 3), Compiled(lambda x: (x - 1) * 3)]
    start = threading.Barrier(len(functions))

    def work(function: Compiled) -> None:
        start.wait()
        for size in (4, 5):
            torch.autograd.backward(function(torch.ones(size, requires_grad=True)).sum())

    threads = [threading.Thread(target=work, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(alone.entered) == {"compile forward", "compile backward", "first run"}
    assert len(alone.entered) >= 3 * 3
    assert alone.most == 1


def test_options_that_differ_are_kinds_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    # Compiled outside the guard they would meet torch's limit of eight graphs, and no lock.
    limits: list[int] = []

    def backend(graph: Any, _inputs: Any) -> Callable[..., Any]:
        limits.append(torch._dynamo.config.recompile_limit)
        run: Callable[..., Any] = graph.forward
        return run

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    function = Compiled(lambda x, options: x * options["factor"])
    for factor in (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31):
        for is_training in (True, False):
            with torch.set_grad_enabled(is_training):
                assert float(function(torch.ones(3), {"factor": factor})[0]) == factor
    assert limits
    assert set(limits) == {RECOMPILE_LIMIT}


@pytest.mark.parametrize("default", [torch.float32, torch.bfloat16])
def test_whatever_torch_guards_on_is_compiled_under_the_guard(
    monkeypatch: pytest.MonkeyPatch, default: torch.dtype
) -> None:
    limits: list[int] = []

    def backend(graph: Any, _inputs: Any) -> Callable[..., Any]:
        limits.append(torch._dynamo.config.recompile_limit)
        run: Callable[..., Any] = graph.forward
        return run

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    function = Compiled(lambda x: x + 1)
    storage = torch.ones(12)
    for values in (
        storage[:6],
        storage[3:9],
        storage[::2],
        storage.double(),
        storage.clone().requires_grad_(),
    ):
        for is_training in (True, False):
            torch.set_default_dtype(default if is_training else torch.float32)
            with torch.set_grad_enabled(is_training):
                function(values)
    assert set(limits) == {RECOMPILE_LIMIT}


def test_disabled_compiler_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "_said", set())
    function = Compiled(lambda x: x + 1)
    with torch._dynamo.config.patch(disable=True):
        with pytest.warns(notices.DFlashWarning, match="torch.compile is disabled"):
            assert float(function(torch.ones(3))[0]) == 2.0
        function(torch.ones(4))


def test_compiler_is_asked_only_for_what_is_called_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def compile_(function: Callable[..., Any], **_: Any) -> Callable[..., Any]:
        asked.append(function)
        return function

    monkeypatch.setattr(torch, "compile", compile_)
    function = Compiled(lambda x: x + 1)
    assert function.when(False)(1) == 2
    assert not asked
    for _ in range(2):
        assert function.when(True)(1) == 2
    assert asked == [function.plain]


def test_what_cannot_be_one_graph_is_an_error() -> None:
    def breaks(values: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return values + 1

    with pytest.raises(Exception, match="graph_break"):
        Compiled(breaks)(torch.ones(3))


def test_first_call_of_a_kernel_needs_nothing_of_the_compiler_to_be_loaded_before() -> None:
    code = "from dflash.compiling import FirstCalls\nwith FirstCalls().guard(1):\n    pass"
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)}, timeout=60
    )
