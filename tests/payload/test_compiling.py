"""Compiled functions: one graph serves lengths that change, and no two are compiled at the same time.

Tracing, guards and what happens to arguments are torch's own; graphs are run and not made into kernels.
"""

import functools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from dflash import drafter, pointwise
from dflash.compiling import Compiled
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


def test_two_threads_never_compile_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    inside, most = 0, 0

    def backend(graph: Any, _inputs: Any) -> Callable[..., Any]:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        time.sleep(0.05)
        inside -= 1
        run: Callable[..., Any] = graph.forward
        return run

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    functions = [Compiled(lambda x: x * 2), Compiled(lambda x: x + 3), Compiled(lambda x: x - 1)]
    results: list[float] = []
    start = threading.Barrier(len(functions))

    def work(function: Compiled) -> None:
        start.wait()
        results.extend(float(function(torch.ones(size))[0]) for size in (4, 5))

    threads = [threading.Thread(target=work, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [0.0, 0.0, 2.0, 2.0, 4.0, 4.0]
    assert most == 1


def test_what_cannot_be_one_graph_is_an_error() -> None:
    def breaks(values: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return values + 1

    with pytest.raises(Exception, match="graph_break"):
        Compiled(breaks)(torch.ones(3))
