"""Checks of what a caller hands to the drafter; a refusal names the number found and the one needed.

Nothing here reads a tensor's values except `checked_anchors`, so nothing else waits for a device.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dflash.config import LOSS_WEIGHTS, SLIDING, DrafterConfig
from dflash.values import require_choice

if TYPE_CHECKING:  # parameters are checked before torch is loaded
    from torch import Tensor


LEAST_GAMMA = 1e-6  # below, a float32 weight is 0/0


def checked_layer_ids(ids: Sequence[int], num_target_layers: int) -> tuple[int, ...]:
    """Return the ids as a tuple if their states can be captured from a target of that many layers."""
    if not ids or len(set(ids)) != len(ids):
        raise ValueError(f"target_layer_ids are {list(ids)}; they must be one or more different layers")
    for layer in ids:
        # The state after the last layer is normed, unlike all the others.
        if not 0 <= layer < num_target_layers - 1:
            raise ValueError(
                f"target layer id {layer} is out of range: of {num_target_layers} target layers, "
                f"0 to {num_target_layers - 2} can be captured"
            )
    return tuple(ids)


def checked_mask_token(mask: int | None, pad: int | None, vocab_size: int) -> int:
    """Return the mask token if there is one, in the vocabulary, that is not the padding."""
    if mask is None:
        raise ValueError("mask_token_id is missing; name a token that the target's data never holds")
    if type(mask) is not int:
        raise ValueError(f"mask_token_id is {mask!r}; it must be an integer")
    if not 0 <= mask < vocab_size:
        raise ValueError(f"mask_token_id {mask} is out of range: the vocabulary has {vocab_size} tokens")
    if mask == pad:
        raise ValueError(f"mask_token_id {mask} equals pad_token_id {pad}; the mask needs a token of its own")
    return mask


def checked_at_least(name: str, value: int, least: int) -> int:
    """Return the value if it is large enough."""
    if type(value) is not int:
        raise ValueError(f"{name} is {value!r}; it must be an integer")
    if value < least:
        raise ValueError(f"{name} is {value}; it must be at least {least}")
    return value


def checked_between(name: str, value: int, least: int, most: int) -> int:
    """Return the value if it lies in that range, both ends included."""
    if checked_at_least(name, value, least) > most:
        raise ValueError(f"{name} is {value}; it must be at most {most}")
    return value


def check_window(config: DrafterConfig, block_size: int) -> None:
    """Refuse a sliding window that would end inside a block."""
    if SLIDING in config.layer_types and config.sliding_window < block_size:
        raise ValueError(
            f"sliding_window is {config.sliding_window}, but block_size is {block_size}; a sliding layer's "
            f"window must reach from a block's last slot to its first, so it must be at least {block_size}"
        )


def checked_anchors(anchors: "Tensor", row_length: int) -> "Tensor":
    """Return the anchors on the host if they are indices of the row."""
    if anchors.ndim != 1 or anchors.is_floating_point() or anchors.is_complex() or anchors.element_size() < 2:
        shape = tuple(anchors.shape)
        raise ValueError(f"anchors are {anchors.dtype} of shape {shape}; they must be a vector of integers")
    anchors_N = anchors.cpu().long()
    for anchor in (int(anchors_N.min()), int(anchors_N.max())) if len(anchors_N) else ():
        if not 0 <= anchor < row_length:
            raise ValueError(f"anchor {anchor} lies outside the row of {row_length} tokens")
    return anchors_N


def check_states(
    features: "Tensor", last_hidden: "Tensor | None", *, row_length: int, target_layers: int, hidden_size: int
) -> None:
    """Refuse captured states that are not one row of that length and width."""
    width = target_layers * hidden_size
    if features.shape[-1] != width:
        raise ValueError(
            f"all_hidden_states is {features.shape[-1]} wide, but {target_layers} target layers of "
            f"hidden_size {hidden_size} make {width}"
        )
    check_shape("all_hidden_states", features, (1, row_length, width))
    if last_hidden is not None:
        check_shape("verifier_last_hidden", last_hidden, (1, row_length, hidden_size))


def check_shape(name: str, tensor: "Tensor", expected: tuple[int, ...]) -> None:
    """Refuse a tensor of another shape."""
    if tuple(tensor.shape) != expected:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {expected}")


def check_objective(kl_weight: float, gamma: float) -> None:
    """Refuse loss weights that make no loss."""
    if not 0.0 <= kl_weight <= 1.0:
        raise ValueError(f"kl_weight is {kl_weight}; it must be between 0 and 1")
    if not gamma >= LEAST_GAMMA:
        raise ValueError(f"gamma is {gamma}; it must be at least {LEAST_GAMMA}")


def check_loss_weights(loss_weights: str, alpha: float, *, kl_weight: float) -> None:
    """Refuse weights that are unknown, or d-pace where the losses do not tell the labels' probabilities."""
    require_choice("loss_weights", loss_weights, LOSS_WEIGHTS)
    if not 0.0 < alpha <= 1.0:
        raise ValueError(f"alpha is {alpha}; it must be above 0 and at most 1")
    if loss_weights == "d-pace" and kl_weight > 0:
        raise ValueError(
            f"loss_weights d-pace weighs the cross-entropy alone, and kl_weight is {kl_weight}; "
            "set kl_weight to 0 or use_soft_labels to False"
        )
