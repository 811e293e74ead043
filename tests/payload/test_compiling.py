"""Compiled functions: one graph serves lengths that change, and no two are compiled at the same time.

Tracing and guards are torch's own; what the graphs become does not matter here, so they stay as they are.
"""

import functools
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from dflash import drafter, pointwise
from dflash.compiling import Compiled
from dflash.execution import Execution

from tests.payload.cases import Case, build, gradients_of, relative_error

FUNCTIONS = [name for name, value in vars(pointwise).items() if isinstance(value, Compiled)]
SEVERAL = replace(Case(), lengths=(40, 25), padding=3, anchors=None, max_anchors=9)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The functions that were compiled, one entry a graph; every pointwise part is compiled."""
    made: list[str] = []

    def backend(name: str, graph: Any, _inputs: Any) -> Callable[..., Any]:
        made.append(name)
        run: Callable[..., Any] = graph.forward
        return run

    compiled: Any = functools.partial(torch.compile)
    for name in FUNCTIONS:
        function = getattr(pointwise, name).plain
        with monkeypatch.context() as patch:
            patch.setattr(
                torch, "compile", functools.partial(compiled, backend=functools.partial(backend, name))
            )
            replacement = Compiled(function)
        monkeypatch.setattr(pointwise, name, replacement)
    monkeypatch.setattr(
        drafter,
        "choose_execution",
        lambda config, **_: Execution(attention=config.attention, is_compiled=True, chunk_blocks=8),
    )
    torch.compiler.reset()
    yield made
    torch.compiler.reset()


@pytest.mark.parametrize("recompute", ["none", "mlp", "layer"])
def test_fifty_rows_of_differing_lengths_need_a_handful_of_graphs(graphs: list[str], recompute: str) -> None:
    counts = []
    for number in range(50):
        lengths = (11 + (7 * number) % 53, 5 + (3 * number) % 29)
        case = replace(SEVERAL, lengths=lengths, max_anchors=2 + number % 9, recompute=recompute)
        bench = build(replace(case, attention="sdpa_chunked", dtype=torch.float32))
        torch.autograd.backward(bench.run(seed=number)[0])
        counts.append(len(graphs))
    assert set(graphs) == set(FUNCTIONS)
    # Compiled for one length, then for all; queries and keys of `norm_rotate` begin at different rows.
    assert max(graphs.count(name) for name in FUNCTIONS) <= 4
    assert counts[-1] == counts[9]


def test_compiled_parts_change_no_gradient(graphs: list[str]) -> None:
    case = replace(SEVERAL, anchors=(2, 9, 41, 60), attention="eager")
    found = build(case)
    torch.autograd.backward(found.run()[0])
    assert set(graphs) == set(FUNCTIONS)
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
