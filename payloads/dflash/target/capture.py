"""What a drafter needs to see of a frozen model: some layers' states and the normed last ones, for one row.

Knows how a row runs through the model and which states are kept. Loading the model, filling rows and moving
states to a drafter are others' business.

Shape letters: S tokens of the row, D tokens of its documents, F features (target layers × H), H hidden,
V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dflash.checks import checked_layer_ids
from dflash.target.checking import check_architecture, check_behaviour
from dflash.target.parts import decoder_of, embedding_of, head_of, layers_of, text_config
from dflash.target.recurrence import beginning_anew, gap_for, recurrent_layers
from dflash.target.rows import TargetRow, lay_out_row
from dflash.transfer import to_device


@dataclass(frozen=True, kw_only=True, slots=True)
class Captured:
    """A row's states on the device of the target's last layer, in its type; zero in the padding.

    `features_1SF` joins the chosen layers in their given order; `last_hidden_1SH` comes after the target's
    final norm, so that its product with the head is the target's logits.
    """

    features_1SF: Tensor
    last_hidden_1SH: Tensor


class Target:
    """A frozen causal language model whose states are captured.

    Captured states equal `hidden_states[id + 1]` of a run of each document alone, whatever else the row
    holds. That is tried out on two short documents when a target is made, and so is that the head makes the
    model's own logits of its last states.

    One thread at a time may capture.

    Raises:
        ValueError: a layer id cannot be captured, the model's head does more than a product, or its states
            depend on what else stands in the row.
    """

    def __init__(self, model: Any, target_layer_ids: Sequence[int]) -> None:
        check_architecture(model)
        self.model = model
        self.config = text_config(model.config)
        self.target_layer_ids = checked_layer_ids(target_layer_ids, self.num_layers)
        self._decoder: Any = decoder_of(model)
        self._layers = layers_of(model)
        self._recurrent = recurrent_layers(self._decoder)
        check_behaviour(model, self)

    @property
    def hidden_size(self) -> int:
        """The width of a state."""
        return int(self.embed_tokens_VH.shape[1])

    @property
    def vocab_size(self) -> int:
        """The number of rows of embedding and head."""
        return int(self.embed_tokens_VH.shape[0])

    @property
    def num_layers(self) -> int:
        """The number of the target's layers."""
        return int(self.config.num_hidden_layers)

    @property
    def embed_tokens_VH(self) -> Tensor:
        """The embedding's weight."""
        return embedding_of(self.model)

    @property
    def lm_head_VH(self) -> Tensor:
        """The head's weight; a tied target's is its embedding's."""
        return head_of(self.model)

    @torch.no_grad()
    def capture(self, input_ids_1S: Tensor, lengths: Sequence[int]) -> Captured:
        """Run a packed row and return its states; the head is not computed.

        Args:
            input_ids_1S: token ids, on any device.
            lengths: tokens of each document in order; what they leave of the row is padding.

        Raises:
            ValueError: the row holds no document, or the documents do not fit into it.
        """
        row = lay_out_row(input_ids_1S, lengths, gap=gap_for(self._recurrent))
        first, last = self.embed_tokens_VH.device, next(self._layers[-1].parameters()).device
        features, normed = (
            _Rows(row, row_length=input_ids_1S.shape[1], parts=parts, device=last)
            for parts in (len(self.target_layer_ids), 1)
        )
        with self._watched(features), beginning_anew(self._recurrent, row):
            output = self._decoder(
                input_ids=to_device(row.input_ids_1T, first),
                position_ids=to_device(row.position_ids_1T, first),
                use_cache=False,
            )
        normed.put(0, output.last_hidden_state)
        return Captured(features_1SF=features.filled, last_hidden_1SH=normed.filled)

    @contextmanager
    def _watched(self, features: "_Rows") -> Iterator[None]:
        """Copy the chosen layers' states while the model runs; nothing else of them is held."""
        handles = [
            self._layers[layer].register_forward_hook(_copying(features, part))
            for part, layer in enumerate(self.target_layer_ids)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _copying(features: "_Rows", part: int) -> Callable[..., None]:
    def hook(_layer: nn.Module, _args: Any, output: Any) -> None:
        features.put(part, output[0] if isinstance(output, tuple) else output)

    return hook


class _Rows:
    """A row of states `[1, S, parts·H]`, filled part by part with the documents' states."""

    def __init__(self, row: TargetRow, *, row_length: int, parts: int, device: torch.device) -> None:
        self._tokens, self._row_length, self._parts, self._device = len(row.kept_D), row_length, parts, device
        self._kept_D = None if row.is_contiguous else row.kept_D
        self._filled_1SX: Tensor | None = None

    def put(self, part: int, states_1TH: Tensor) -> None:
        """Copy the documents' states."""
        hidden = states_1TH.shape[-1]
        if self._filled_1SX is None:
            shape = (1, self._row_length, self._parts * hidden)
            self._filled_1SX = torch.empty(shape, dtype=states_1TH.dtype, device=self._device)
            self._filled_1SX[:, self._tokens :] = 0
        states_DH = self._without_gaps(states_1TH[0])
        self._filled_1SX[0, : self._tokens, part * hidden : (part + 1) * hidden] = states_DH

    def _without_gaps(self, states_TH: Tensor) -> Tensor:
        if self._kept_D is None:
            return states_TH[: self._tokens]
        if self._kept_D.device != states_TH.device:
            self._kept_D = to_device(self._kept_D.cpu(), states_TH.device)
        return states_TH.index_select(0, self._kept_D)

    @property
    def filled(self) -> Tensor:
        """The whole row."""
        assert self._filled_1SX is not None, "no layer ran"
        return self._filled_1SX
