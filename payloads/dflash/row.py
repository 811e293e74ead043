"""One row as a target worker hands it over, checked and placed.

Large tensors stay where they are; what decides shapes (documents, loss mask) is read on the host once.

Shape letters: S tokens of the row, F features (target layers × H), H hidden.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from dflash.checks import check_shape
from dflash.packing import Packing, pack


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A packed row; tensors are on the drafter's device, except `loss_mask_S` and the packing."""

    features_SF: Tensor
    tokens_S: Tensor
    positions_S: Tensor
    loss_mask_S: Tensor
    packing: Packing


def read_row(
    *,
    all_hidden_states: Tensor,
    input_ids: Tensor,
    loss_mask: Tensor,
    lengths: Sequence[int] | Tensor | None,
    position_ids: Tensor | None,
) -> Row:
    """Return the row; batches of one only.

    Raises:
        ValueError: shapes do not agree, or the documents do not fit into the row.
    """
    row_length, device = input_ids.shape[-1], all_hidden_states.device
    check_shape("input_ids", input_ids, (1, row_length))
    check_shape("loss_mask", loss_mask, (1, row_length))
    packing = pack(lengths, row_length)
    positions = packing.positions_S[None] if position_ids is None else position_ids
    check_shape("position_ids", positions, (1, row_length))
    return Row(
        features_SF=_without_padding(all_hidden_states[0], sum(packing.lengths)),
        tokens_S=input_ids[0].to(device),
        positions_S=positions[0].to(device).long(),
        loss_mask_S=loss_mask[0].cpu() != 0,
        packing=packing,
    )


def _without_padding(features_SF: Tensor, tokens: int) -> Tensor:
    """Return the features with zeros in the padding, where a target may have left NaN."""
    if tokens == len(features_SF):
        return features_SF
    return functional.pad(features_SF[:tokens], (0, 0, 0, len(features_SF) - tokens))
