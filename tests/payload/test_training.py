"""The drafter learns: one batch is fitted until nearly every slot is right."""

import pytest
import torch

from tests.payload.cases import FULL, SLIDING, Case, build


@pytest.mark.parametrize("recompute", ["none", "layer"])
def test_one_batch_overfits(recompute: str) -> None:
    case = Case(
        layer_types=(SLIDING, FULL),
        hidden_size=32,
        head_dim=16,
        intermediate_size=64,
        lengths=(16, 12),
        anchors=(1, 4, 9, 17, 21),
        attention="sdpa_chunked",
        recompute=recompute,
        dtype=torch.float32,
    )
    bench = build(case)
    optimizer = torch.optim.AdamW([p for p in bench.drafter.parameters() if p.requires_grad], lr=3e-3)
    first = float(bench.run()[0].detach())
    for _ in range(60):
        optimizer.zero_grad()
        torch.autograd.backward(bench.run(use_soft_labels=False)[0])
        optimizer.step()
    loss, metrics = bench.run(use_soft_labels=False)
    assert float(metrics["accuracy"]) >= 0.99
    assert float(metrics["avg_streak"]) > 3.0
    assert float(loss.detach()) < 0.1 * first
