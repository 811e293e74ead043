"""Whether a model can be a target: what its configuration says, and how it behaves on two short documents.

A drafter's teacher is `last_hidden @ lm_headᵀ`, so a head that scales or caps its logits is refused. States
of packed rows are those of documents alone only if nothing flows between documents; a model whose layers let
it is refused, whatever it is called.

Shape letters: S tokens of the row, F features (target layers × H), H hidden, V vocabulary.
"""

import inspect
import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from dflash.packing import HOST
from dflash.target.parts import decoder_of, embedding_of, head_of, layers_of, text_config

TRIED_LENGTHS = (19, 27)
# What a configuration calls a head that does more than a product, and the value with which it does not.
BEYOND_A_PRODUCT: dict[str, tuple[object, ...]] = {
    "final_logit_softcapping": (None,),
    "logits_soft_cap": (None,),
    "logit_scale": (None, 1),
    "logits_scaling": (None, 1),
    "lm_head_multiplier": (None, 1),
}
# Relative differences from which on something is wrong; what kernels of other shapes round otherwise, and
# experts that get other tokens, stays below.
EXACT, NARROW = 1e-3, 0.25
LEAKED_NARROW, NARROW_LOGITS = 0.03, 0.03


class CapturedStates(Protocol):
    """The two tensors of `dflash.target.capture.Captured`."""

    @property
    def features_1SF(self) -> Tensor:
        """The chosen layers' states."""

    @property
    def last_hidden_1SH(self) -> Tensor:
        """The last states after the final norm."""


class Capturing(Protocol):
    """What is tried out: `dflash.target.capture.Target`."""

    @property
    def target_layer_ids(self) -> tuple[int, ...]:
        """Which layers' states are captured."""

    def capture(self, input_ids_1S: Tensor, lengths: Sequence[int]) -> CapturedStates:
        """Return a packed row's states."""


def check_architecture(model: Any) -> None:
    """Refuse a model that is known to be none for a drafter.

    Raises:
        ValueError: says what the model does.
    """
    config, name = text_config(model.config), type(model).__name__
    for field, harmless in BEYOND_A_PRODUCT.items():
        if getattr(config, field, None) not in harmless:
            raise ValueError(
                f"{name} has {field} {getattr(config, field)}: its logits are more than the product of its "
                "last states with its head, and that is all a drafter's teacher computes; take another target"
            )
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        raise ValueError(
            f"{name}'s head adds a bias to its logits, which no drafter does; take another target"
        )
    if embedding_of(model).shape != head_of(model).shape:
        shapes = f"{tuple(embedding_of(model).shape)} and {tuple(head_of(model).shape)}"
        raise ValueError(f"{name}'s embedding and head are {shapes}; a drafter needs both of one shape")
    if "position_ids" not in inspect.signature(decoder_of(model).forward).parameters:
        raise ValueError(
            f"{name} takes no position_ids, so documents cannot share a row; take another target"
        )
    layers_of(model)


@torch.no_grad()
def check_behaviour(model: Any, target: Capturing) -> None:
    """Refuse a model whose captured states are not those of its documents alone, or do not make its logits.

    Raises:
        ValueError: says which of them are not, and by how much.
    """
    before, document = (_tokens(model, length) for length in TRIED_LENGTHS)
    packed_SX = _second(target.capture(torch.cat([before, document], 1), TRIED_LENGTHS))
    after_another_SX = _second(target.capture(torch.cat([before.flip(1), document], 1), TRIED_LENGTHS))
    document = document.to(embedding_of(model).device)
    alone = model(input_ids=document, use_cache=False, output_hidden_states=True)
    _check_parted(model, packed_SX, after_another_SX)
    kept = [*(layer + 1 for layer in target.target_layer_ids), -1]
    _check_states(model, packed_SX, [alone.hidden_states[number] for number in kept])
    _check_logits(model, alone.hidden_states[-1][0], alone.logits[0])


def _check_parted(model: Any, packed_SX: Tensor, after_another_SX: Tensor) -> None:
    leaked = _difference(after_another_SX, packed_SX)
    if leaked > (EXACT if _is_exact(packed_SX) else LEAKED_NARROW):
        raise ValueError(
            f"{type(model).__name__} lets a document of a row change the next one's states by {leaked:.1%}: "
            "position ids do not part them for its attention, or it has a memory that is not emptied here; "
            "take a target of attention or gated-delta-net layers (the Llama, Qwen3 and Qwen3.5 families)"
        )


def _check_states(model: Any, packed_SX: Tensor, alone: Sequence[Tensor]) -> None:
    wanted_SX = torch.cat([states[0].to(packed_SX.device) for states in alone], -1)
    error = _difference(packed_SX, wanted_SX)
    if error > (EXACT if _is_exact(packed_SX) else NARROW):
        raise ValueError(
            f"{type(model).__name__}'s states in a packed row differ by {error:.1%} from those of the "
            "document alone; take another target"
        )


def _check_logits(model: Any, last_SH: Tensor, own_logits_SV: Tensor) -> None:
    head_VH = head_of(model)
    logits_SV = last_SH.to(head_VH.device) @ head_VH.T
    error = _difference(logits_SV, own_logits_SV.to(head_VH.device))
    if error > (EXACT if _is_exact(last_SH) else NARROW_LOGITS):
        raise ValueError(
            f"{type(model).__name__}'s logits differ by {error:.1%} from the product of its last states with "
            "its head, and that is all a drafter's teacher computes; take another target"
        )


def _is_exact(states: Tensor) -> bool:
    return states.dtype in (torch.float32, torch.float64)


def _tokens(model: Any, length: int) -> Tensor:
    """Return `[1, length]` tokens from all over the vocabulary."""
    return (torch.arange(1, length + 1, device=HOST) * 7919 + length)[None] % len(embedding_of(model))


def _second(captured: CapturedStates) -> Tensor:
    """Return the second document's states, features and then the last ones."""
    start = TRIED_LENGTHS[0]
    return torch.cat([captured.features_1SF[0, start:], captured.last_hidden_1SH[0, start:]], -1)


def _difference(found: Tensor, wanted: Tensor) -> float:
    """Return the mean over tokens of the relative difference; infinite where one is not finite."""
    found, wanted = found.double(), wanted.double()
    error = ((found - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp(min=1e-12)).mean().item()
    return float(error) if math.isfinite(error) else math.inf
