"""Which tokens start a block.

An anchor needs a label behind it: it and the next token are in the loss mask and in one document. Documents
share the budget by largest remainder, and none that could have an anchor goes without one while the budget
lasts. Drawing happens on the host, so that a seed gives the same anchors on every device.

Shape letters: S tokens of the row, N anchors.
"""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from dflash.packing import HOST, Packing


def draw_anchors(packing: Packing, loss_mask_S: Tensor, *, max_anchors: int, seed: int | None) -> Tensor:
    """Return anchors `[N]`, N = min(max_anchors, valid ones), those of a document in the order drawn.

    Without a seed torch's global generator draws.
    """
    generator = None if seed is None else torch.Generator(device=HOST).manual_seed(seed)
    valid_by_document = [
        part.nonzero().flatten() for part in _split(packing, valid_anchors(packing, loss_mask_S))
    ]
    quotas = anchor_quotas([len(valid) for valid in valid_by_document], max_anchors)
    starts = [0, *itertools.accumulate(packing.lengths)]
    chosen = [
        start + valid[torch.randperm(len(valid), generator=generator, device=HOST)[:quota]]
        for start, valid, quota in zip(starts, valid_by_document, quotas, strict=False)
    ]
    return torch.cat(chosen) if chosen else torch.empty(0, dtype=torch.int64, device=HOST)


def valid_anchors(packing: Packing, loss_mask_S: Tensor) -> Tensor:
    """Return `[S]` booleans: whether a block may start at each token."""
    next_S = torch.arange(1, packing.row_length + 1, device=HOST)
    next_counts_S = torch.cat([loss_mask_S[1:], loss_mask_S.new_zeros(1)])
    return loss_mask_S & next_counts_S & (next_S < packing.ends_S)


def anchor_quotas(available: Sequence[int], budget: int) -> list[int]:
    """Return how many anchors each document gets, given how many it could have."""
    total = sum(available)
    budget = min(budget, total)
    if budget == 0:
        return [0] * len(available)
    # Integers throughout: shares are count·budget/total, remainders are in units of 1/total.
    quotas = [count * budget // total for count in available]
    remainders = [count * budget % total for count in available]
    by_remainder = sorted(range(len(available)), key=lambda document: remainders[document], reverse=True)
    for document in by_remainder[: budget - sum(quotas)]:
        quotas[document] += 1
    return _without_starvation(quotas, available)


def _without_starvation(quotas: list[int], available: Sequence[int]) -> list[int]:
    for document, count in enumerate(available):
        if count and not quotas[document]:
            richest = max(range(len(quotas)), key=quotas.__getitem__)
            if quotas[richest] <= 1:
                break
            quotas[richest] -= 1
            quotas[document] += 1
    return quotas


def _split(packing: Packing, values_S: Tensor) -> tuple[Tensor, ...]:
    documents = values_S[: sum(packing.lengths)]
    return torch.split(documents, list(packing.lengths))
