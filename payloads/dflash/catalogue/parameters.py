"""What of a probe's parameters decides a shape; defaults are those of `dflash.probes.oom`.

Parameters of any probe will do: `backends`, `policies` and `anchor_counts` stand for one configuration each.
"""

import difflib
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from dflash.catalogue.terms import ITEM_BYTES
from dflash.config import ATTENTION_BACKENDS, DTYPES, RECOMPUTE_POLICIES
from dflash.probes.oom import OPTIMIZERS, OomProbeParams
from dflash.probes.size import check_counts, check_device
from dflash.tiling import ALIGNED_BYTES, LEAST_FLEX_HEAD_DIM
from dflash.values import build, require_choice, require_positive, unknown

_DEFAULTS: dict[str, Any] = {part.name: part.default for part in fields(OomProbeParams)}


def _as_the_probe(name: str) -> Any:
    return field(default=_DEFAULTS[name])


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameters:
    """The numbers that shapes are made of; the rest of a probe's parameters changes no shape."""

    device: str = _as_the_probe("device")
    dtype: str = _as_the_probe("dtype")
    attention: str = _as_the_probe("attention")
    recompute: str = _as_the_probe("recompute")
    compile: bool = _as_the_probe("compile")
    optimizer: str = _as_the_probe("optimizer")
    chunk_blocks: int = _as_the_probe("chunk_blocks")
    loss_chunk_rows: int = _as_the_probe("loss_chunk_rows")
    num_draft_layers: int = _as_the_probe("num_draft_layers")
    hidden_size: int = _as_the_probe("hidden_size")
    num_attention_heads: int = _as_the_probe("num_attention_heads")
    num_key_value_heads: int = _as_the_probe("num_key_value_heads")
    head_dim: int = _as_the_probe("head_dim")
    intermediate_size: int = _as_the_probe("intermediate_size")
    vocab_size: int = _as_the_probe("vocab_size")
    target_layer_ids: tuple[int, ...] = _as_the_probe("target_layer_ids")
    block_size: int = _as_the_probe("block_size")
    seq_len: int = _as_the_probe("seq_len")
    max_anchors: int = _as_the_probe("max_anchors")
    packed_lengths: tuple[int, ...] = _as_the_probe("packed_lengths")
    backends: tuple[str, ...] = ()
    policies: tuple[str, ...] = ()
    anchor_counts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_device(self.device, None)
        require_choice("dtype", self.dtype, DTYPES)
        require_choice("optimizer", self.optimizer, OPTIMIZERS)
        for name in (self.attention, *self.backends):
            require_choice("attention backend", name, ATTENTION_BACKENDS)
        for name in (self.recompute, *self.policies):
            require_choice("recompute policy", name, RECOMPUTE_POLICIES)
        numbers = [part.name for part in fields(self) if part.type in (int, "int")]
        require_positive(self, *numbers)
        check_counts("target_layer_ids", self.target_layer_ids, least=0)
        check_counts("packed_lengths", self.packed_lengths, least=1)
        for count in self.anchor_counts:
            check_counts("anchor_counts", [count], least=1)
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )

    def configurations(self) -> Iterator["Parameters"]:
        """Yield one configuration for each backend, policy and number of anchors."""
        for attention, recompute, anchors in itertools.product(
            self.backends or (self.attention,),
            self.policies or (self.recompute,),
            self.anchor_counts or (self.max_anchors,),
        ):
            yield replace(self, attention=attention, recompute=recompute, max_anchors=anchors)

    @property
    def is_cuda(self) -> bool:
        """Whether it runs on a GPU."""
        return self.device != "cpu"

    @property
    def is_compiled(self) -> bool:
        """Whether kernels are compiled, as far as parameters say."""
        return self.compile and self.is_cuda

    @property
    def backend(self) -> str:
        """The attention that runs in training, by the rules of `dflash.execution` that ask for no card."""
        chosen = self.attention
        if chosen == "auto":
            chosen = "flex" if self.is_cuda else "sdpa_chunked"
        if chosen == "flex" and not self._can_flex:
            chosen = "sdpa_chunked"
        if chosen == "sdpa_chunked" and self.is_cuda and self.dtype != "float64":
            return "sdpa_math" if self.head_dim * ITEM_BYTES[self.dtype] % ALIGNED_BYTES else chosen
        return chosen

    @property
    def _can_flex(self) -> bool:
        if not self.is_cuda or not self.compile:
            return self.is_cuda
        return self.dtype != "float64" and self.head_dim >= LEAST_FLEX_HEAD_DIM

    @property
    def exact(self) -> str:
        """The type of what must not round."""
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def is_narrow(self) -> bool:
        """Whether states and weights have fewer bits than that."""
        return self.dtype != self.exact


def read_parameters(values: Mapping[str, object]) -> tuple[Parameters, tuple[str, ...]]:
    """Return the parameters, and the names of those that no probe has.

    Raises:
        ValueError: a value has the wrong type or is out of range.
    """
    names = [part.name for part in fields(Parameters)]
    known = {name: value for name, value in values.items() if name in names}
    return build(Parameters, known, what="parameter"), tuple(sorted(values.keys() - KNOWN))


def misspelt(names: Iterable[str]) -> list[str]:
    """Return the sentence that refuses a name for each of `names` that is nearly a probe's."""
    return [
        unknown("parameter", name, KNOWN)
        for name in names
        if difflib.get_close_matches(name, KNOWN, n=1, cutoff=NEAR)
    ]


NEAR = 0.8  # by difflib: max_anchor is, what another trainer calls num_layers is not
_OF_OTHER_PROBES = {"dtypes", "warmups", "profile"}
KNOWN = {part.name for part in fields(Parameters)} | _DEFAULTS.keys() | _OF_OTHER_PROBES
