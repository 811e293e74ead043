"""What every test on a card gets: the card, empty, and torch's default dtype back where it was.

    pytest -m gpu

Without a card these tests fail, since they run only where somebody asked for them.
"""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
# torch warns its own code of itself, of what is loaded with the first compilation on a card.
TORCH_TO_ITSELF = (
    "ignore:.*torch.jit.script_method:DeprecationWarning",
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
    "ignore:Synchronization debug mode is a prototype:UserWarning",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            for line in TORCH_TO_ITSELF:
                item.add_marker(pytest.mark.filterwarnings(line))


@pytest.fixture
def card() -> Iterator[torch.device]:
    if not torch.cuda.is_available():
        pytest.fail(f"torch {torch.__version__} sees no CUDA device; deselect these tests or mend the driver")
    default = torch.get_default_dtype()
    device = torch.device("cuda", 0)
    gc.collect()
    torch.cuda.empty_cache()
    yield device
    torch.set_default_dtype(default)
    gc.collect()
    torch.cuda.empty_cache()
