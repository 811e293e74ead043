"""Every attention backend on a card gives what the float64 reference gives, by the kernels meant for it."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from dflash import notices
from torch import Tensor
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from tests.gpu.benches import build_on, errors, exact
from tests.payload.cases import FULL, SLIDING, Case

pytestmark = pytest.mark.gpu

TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 6e-2}
BACKENDS = ("flex", "sdpa_chunked", "sdpa_math", "eager")
SMALL = Case(
    hidden_size=64,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=32,
    intermediate_size=96,
    vocab_size=101,
    mask_token_id=100,
    block_size=7,
    sliding_window=24,
    rope_theta=1e4,
    lengths=(61, 37, 90),
    padding=5,
    anchors=tuple(range(3, 185, 13)),
)
ROWS = {
    "packed, with holes": replace(SMALL, holes=(40, 70, 71, 130)),
    "one document": replace(SMALL, lengths=(131,), padding=0, anchors=(0, 1, 2, 64, 129)),
    "many short documents": replace(
        SMALL, lengths=tuple(range(2, 15)), padding=3, anchors=tuple(range(0, 102, 7))
    ),
    "one anchor with no context": replace(SMALL, anchors=(0,)),
    "block of sixteen": replace(SMALL, block_size=16, sliding_window=33, anchors=tuple(range(5, 180, 17))),
    "three groups of heads": replace(
        SMALL,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=24,
        lengths=(41, 26),
        anchors=tuple(range(3, 62, 9)),
    ),
    "more blocks than fit one chunk": replace(SMALL, anchors=tuple(range(1, 187, 2))),
    "row shorter than a tile, few slots": replace(SMALL, lengths=(9, 7), padding=0, anchors=(2, 11)),
}


@pytest.mark.parametrize("attention", BACKENDS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", ROWS.values(), ids=ROWS.keys())
def test_loss_and_gradients_equal_the_float64_reference(
    card: torch.device, case: Case, dtype: torch.dtype, attention: str
) -> None:
    case = replace(case, dtype=dtype)
    found = errors(build_on(card, replace(case, attention=attention)), exact(case))
    assert max(found.values()) < TOLERANCE[dtype], found


@pytest.mark.parametrize("recompute", ["mlp", "layer"])
@pytest.mark.parametrize("attention", BACKENDS)
def test_recomputing_changes_no_result(card: torch.device, attention: str, recompute: str) -> None:
    case = replace(SMALL, dtype=torch.float32)
    found = errors(build_on(card, replace(case, attention=attention, recompute=recompute)), exact(case))
    assert max(found.values()) < TOLERANCE[torch.float32], found


@pytest.mark.parametrize("attention", BACKENDS)
def test_float32_drafter_with_a_bfloat16_target(card: torch.device, attention: str) -> None:
    # The head multiplies in its own type, so this is as exact as bfloat16 and no more.
    case = replace(SMALL, dtype=torch.float32, attention=attention)
    bench = build_on(card, case)
    bench.drafter.use_target_weights(
        embed_tokens_VH=bench.drafter.embed_tokens.weight.bfloat16(),
        lm_head_VH=bench.drafter.lm_head.weight.bfloat16(),
    )
    found = errors(bench, exact(replace(case, attention="eager")))
    assert max(found.values()) < TOLERANCE[torch.bfloat16], found
    assert bench.run()[0].dtype == torch.float32
    assert {p.grad.dtype for p in bench.drafter.parameters() if p.grad is not None} == {torch.float32}


class Operators(TorchDispatchMode):
    """Notes which operators run, backward included, and the largest tensor of float32 that any returned."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()
        self.largest_float32 = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.names.add(function.overloadpacket.__name__)
        for part in result if isinstance(result, tuple | list) else (result,):
            if isinstance(part, Tensor) and part.dtype == torch.float32:
                self.largest_float32 = max(self.largest_float32, part.numel())
        return result


@pytest.mark.parametrize("recompute", ["none", "layer"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=["float32", "bfloat16"])
def test_chunks_are_attended_by_the_memory_efficient_kernel(
    card: torch.device, dtype: torch.dtype, recompute: str
) -> None:
    case = replace(SMALL, dtype=dtype, attention="sdpa_chunked", recompute=recompute, loss_chunk_rows=16)
    bench = build_on(card, case)
    with Operators() as operators:
        torch.autograd.backward(bench.run()[0])
    attention = {name for name in operators.names if "scaled_dot_product" in name}
    assert attention == {
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_efficient_attention_backward",
    }
    # The math path would hold scores per head, in float32 whatever the type.
    assert "softmax" not in " ".join(operators.names - {"_log_softmax"})


def test_uncompiled_flex_holds_scores_and_says_so(
    card: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notices, "_said", set())
    case = replace(SMALL, dtype=torch.float32, attention="flex", compile=False)
    with pytest.warns(notices.DFlashWarning, match="runs uncompiled and holds scores"):
        found = errors(build_on(card, case), exact(case))
    assert max(found.values()) < TOLERANCE[torch.float32], found


@pytest.mark.parametrize("recompute", ["none", "layer"])
def test_fifty_rows_of_differing_lengths_need_a_handful_of_graphs(card: torch.device, recompute: str) -> None:
    torch.compiler.reset()
    counts = []
    for number in range(50):
        lengths = (150 + (37 * number) % 353, 50 + (13 * number) % 229)
        anchors = tuple(range(1, sum(lengths) - 1, 9 + number % 7))
        case = replace(SMALL, lengths=lengths, anchors=anchors, dtype=torch.bfloat16, recompute=recompute)
        loss, _ = build_on(card, replace(case, attention="flex")).run()
        torch.autograd.backward(loss)
        assert torch.isfinite(loss.detach())
        counts.append(counters["stats"]["unique_graphs"])
    made = counts[-1] - counts[0] + 10
    assert made <= 40, counts
    assert counts[-1] == counts[30], counts


# Between the smallest sizes and the reference's: 256 blocks of 16 slots over a row of 4,096 tokens.
MIDDLE = Case(
    layer_types=(SLIDING, SLIDING, FULL),
    sliding_window=512,
    hidden_size=1024,
    num_attention_heads=16,
    num_key_value_heads=4,
    head_dim=64,
    intermediate_size=3584,
    vocab_size=32000,
    rope_theta=1e7,
    block_size=16,
    mask_token_id=31999,
    lengths=(4096,),
    padding=0,
    anchors=tuple(range(8, 4096, 16)),
    attention="sdpa_chunked",
    recompute="layer",
    loss_chunk_rows=256,
    dtype=torch.bfloat16,
)
MIDDLE_SCORES = 16 * 4096 * (4096 + 4096)  # heads × slots × keys: 2 GiB in float32, for one layer


@pytest.mark.parametrize("attention", ["sdpa_chunked", "flex"])
def test_middle_size_stays_below_what_its_tensors_need_without_scores(
    card: torch.device, attention: str
) -> None:
    mib = 2**20
    bench = build_on(card, replace(MIDDLE, attention=attention))
    torch.autograd.backward(bench.run()[0])  # what compiling takes is not the work's
    bench.drafter.zero_grad()
    torch.cuda.reset_peak_memory_stats(card)
    torch.autograd.backward(bench.run()[0])
    peak = torch.cuda.max_memory_allocated(card)
    needed = {
        "weights, embedding and head": 2 * (44 + 2 * 31.25) * mib,
        "gradients": 2 * 44 * mib,
        "features, last states and their context": 2 * (12 + 4 + 3 * 4) * mib,
        "inputs of three layers": 3 * 2 * 4 * mib,
        "one layer again: four of its width, eight of the feed-forward's": 2 * (4 * 4 + 8 * 14) * mib,
        "masks of both kinds, and one layer's, repeated for 4 heads, as bias": (2 + 4 * 2) * 16 * mib,
        "context in float32, gradients and slices of it": 8 * 4 * 2 * mib,
        "loss: four chunks of 256 × 32,000 in float32 and one in bfloat16": 4.5 * 31.25 * mib,
    }
    assert peak < sum(needed.values()) < MIDDLE_SCORES * 4
    assert peak > 2 * (44 + 2 * 31.25) * mib


def test_middle_size_holds_no_float32_tensor_as_large_as_a_chunks_scores(card: torch.device) -> None:
    # Nothing is compiled while operators are noted, so gate and up stand in float32; narrow ones are smaller.
    bench = build_on(card, replace(MIDDLE, loss_chunk_rows=64, intermediate_size=1792))
    with Operators() as operators:
        torch.autograd.backward(bench.run()[0])
    # One chunk: 512 slots of 16 heads over what the full layer sees at the row's end.
    assert operators.largest_float32 < 16 * 512 * 4096 / 4
