"""What each test of the payload gets: one thread, in programs too, and torch's default dtype as it was."""

import gc
import os
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    # At these sizes a second thread only waits for the first, several times longer on a busy machine.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")  # for programs that tests start
        yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def _modules_are_no_garbage() -> None:
    # Probes call `gc.collect` before each case: to look through all of torch takes longer than the case.
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _default_dtype_restored() -> Iterator[None]:
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


@pytest.fixture
def interpreted() -> None:
    """Triton interprets kernels here: tests/conftest.py says so before Triton is loaded."""
    if "TRITON_INTERPRET" not in os.environ:
        pytest.skip("there is a card here; tests/gpu runs the kernels on it")
