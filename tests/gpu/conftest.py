"""What every test on a card gets: the card, empty, and torch's default dtype back where it was.

    pytest -m gpu

Without a card these tests fail, since they run only where somebody asked for them.
"""

import gc
from collections.abc import Iterator

import pytest
import torch


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
