"""The payload's own code, run on a simulated card: no GPU, no memory, seconds."""

import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask
from torch.overrides import TorchFunctionMode

from dflash import notices
from dflash.cards import Card
from dflash.drafter import DFlashDrafter
from dflash.execution import choose_execution, ways_text
from dflash.memory.attention import attend, attend_flex
from dflash.memory.log import Mark, Trace
from dflash.memory.owners import Owners
from dflash.memory.recorder import Recorder
from dflash.memory.results import CannotSimulate
from dflash.platforms import SIMULATED, simulated

__all__ = ["CannotSimulate", "trace"]

MADE_BETWEEN_COLLECTIONS = 10_000  # objects, more than died; Python's own number is 700


def trace(work: Callable[[], object], *, card: Card) -> Trace:
    """Run the work as it would run on the card, and return what it allocated there.

    Inside, `dflash.probes.work.machine.open_machine` gives the simulated card whatever device is asked for,
    so a probe's own work runs unchanged: `trace(lambda: oom.work(params), card=parse_card("h200"))`. Numbers
    that come from the card are 0; what the work prints is the caller's to redirect, and what it raises comes
    through. torch's default type and generators are afterwards what they were. Out of memory does not happen
    here: the log goes on, and who replays it decides where it ends.

    Raises:
        CannotSimulate: the work asks for a value that only a card could compute, or for an unknown kernel.
    """
    simulation = _Simulation(card)
    with (
        notices.heard() as notes,
        _torch_as_it_was(),
        _rare_collections(),
        simulated(simulation),
        simulation.running(),
    ):
        work()
    recorder = simulation.recorder
    return Trace(
        card=card,
        torch=torch.__version__,
        blocks=tuple(record.block() for record in recorder.records),
        events=tuple(recorder.events),
        execution=simulation.execution,
        notes=tuple(notes),
    )


class _Simulation:
    """What the payload meets of the card (`dflash.platforms.Simulation`)."""

    def __init__(self, card: Card) -> None:
        self.card = card
        self.execution: str | None = None
        self._owners = Owners(self._started)
        self.recorder = Recorder(self._owners, card.capability)
        self.is_compiling = False

    def running(self) -> contextlib.ExitStack:
        """Return the context in which torch computes on this card."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._owners.watching())
            stack.enter_context(self.recorder)
            stack.enter_context(_Functions())
            return stack.pop_all()

    def call_compiled(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """Return the function's results, the only storages that its kernels make."""
        before, self.is_compiling = self.is_compiling, True
        try:
            with self.recorder.quiet():
                results = self.recorder.results.remembered(function, arguments, lambda: function(*arguments))
        finally:
            self.is_compiling = before
        self.recorder.note_results(results, function.__name__)
        return results

    def attend(
        self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, *, enable_gqa: bool
    ) -> Tensor:
        """Return scaled_dot_product_attention's result, by the kernel that torch takes on the card."""
        return attend(
            queries,
            keys,
            values,
            mask,
            enable_gqa=enable_gqa,
            capability=self.card.capability,
            recorder=self.recorder,
        )

    def attend_flex(self, queries: Tensor, keys: Tensor, values: Tensor, mask: BlockMask) -> Tensor:
        """Return flex attention's result, compiled if the code around it is."""
        with self.recorder.quiet(is_quiet=False):
            return attend_flex(
                queries, keys, values, mask, recorder=self.recorder, is_compiled=self.is_compiling
            )

    def begin_phase(self, name: str) -> None:
        """Note that a phase begins."""
        self.recorder.events.append(Mark("phase", name))

    def empty_cache(self) -> None:
        """Note that the allocator gives back what it does not use."""
        self.recorder.events.append(Mark("empty_cache"))

    def _started(self, root: nn.Module) -> None:
        if isinstance(root, DFlashDrafter):
            execution = choose_execution(
                root.config,
                device=SIMULATED,
                dtype=root.fc.weight.dtype,
                needs_gradients=torch.is_grad_enabled(),
            )
            self.execution = ways_text(execution)


class _Functions(TorchFunctionMode):
    """What torch decides by asking for a card, before any operator is called."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Do as the card would."""
        named = kwargs or {}
        if function is functional.rms_norm and args[0].device == SIMULATED:
            return _rms_norm(*args, **named)
        if function is torch.tensor and named.get("device") == SIMULATED:
            return torch.tensor(*args, **{**named, "device": "cpu"}).to(SIMULATED)
        return function(*args, **named)


def _rms_norm(
    rows: Tensor, normalized_shape: list[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """Return torch's norm by its one kernel, which the CPU does not have, where CUDA takes it."""
    if weight is not None and weight.dtype != rows.dtype:
        return functional.rms_norm(rows, normalized_shape, weight, eps)
    apply: Any = _FusedNorm.apply
    normed: Tensor = apply(rows, weight, len(normalized_shape))
    return normed


class _FusedNorm(torch.autograd.Function):
    """aten::_fused_rms_norm keeps its input and one float32 number a row (layer_norm_kernel.cu)."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor | None, dimensions: int) -> Tensor:
        normed = torch.empty_like(rows)
        inverse = rows.new_empty(
            (*rows.shape[:-dimensions], *[1] * dimensions),
            dtype=torch.promote_types(torch.float32, rows.dtype),
        )
        ctx.save_for_backward(rows, weight, inverse)
        return normed

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        _rows, weight, _inverse = ctx.saved_tensors
        of_rows = torch.empty_like(gradient)
        return of_rows, None if weight is None else torch.empty_like(weight), None


@contextlib.contextmanager
def _rare_collections() -> Iterator[None]:
    """Let Python's collector pass over what is there already, and look for cycles more rarely.

    It would take a quarter of the time; nothing of a step on the card dies by it.
    """
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(MADE_BETWEEN_COLLECTIONS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


@contextlib.contextmanager
def _torch_as_it_was() -> Any:
    dtype = torch.get_default_dtype()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        torch.set_default_dtype(dtype)
