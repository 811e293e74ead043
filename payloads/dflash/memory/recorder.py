"""Births and deaths of the storages of a simulated card, operator by operator.

Tensors on the card are those of `dflash.memory.results`, without bytes; tensors on the host are real. A copy
between the two is where one becomes the other, so nothing of the payload is patched. Integers and flags that
come from the host, or from a constant, keep their values beside them while they are only moved and sliced,
since shapes may be read from them later.
"""

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from dflash.memory.kernels import PRODUCTS, STEPS, TEMPORARIES, cublas_workspace_bytes
from dflash.memory.log import Born, Category, Died, Event
from dflash.memory.owners import Owners, Record
from dflash.memory.results import CannotSimulate, CardTensor, Results, empty_strided
from dflash.platforms import SIMULATED

aten = torch.ops.aten

_DEVICE = torch.ops.prim.device.default
_TO_COPY = aten._to_copy.default
_SCALAR = aten._local_scalar_dense.default
KEPT_ELEMENTS = 2**20
_VALUES = "_values_on_host"
# Constants, whose values are known, and what only moves them.
_CONSTANTS = {
    aten.ones.default,
    aten.zeros.default,
    aten.full.default,
    aten.arange.default,
    aten.arange.start,
    aten.arange.start_step,
}
_MOVES = {
    aten._to_copy.default,
    aten.alias.default,
    aten.clone.default,
    aten.detach.default,
    aten.expand.default,
    aten.select.int,
    aten.slice.Tensor,
    aten.t.default,
    aten.unsqueeze.default,
    aten.view.default,
}


# A number that is assigned to a slice becomes a tensor of the host on CUDA, of the device elsewhere.
# (THPVariable_setitem, python_variable_indexing.cpp)
_NUMBER = aten.scalar_tensor.default


class _Attending:
    """One call of attention, in steps."""

    def __init__(self, query: Tensor, key: Tensor) -> None:
        self._lengths = {query.shape[-2], key.shape[-2]}
        self._elements = max(query.numel(), key.numel())

    def makes(self, tensor: Tensor) -> bool:
        """Return whether a step's result is scores, or keys and values expanded for them."""
        return set(tensor.shape[-2:]) == self._lengths or tensor.numel() > self._elements


class Recorder(TorchDispatchMode):
    """A dispatch mode that computes nothing on the card and notes what each operator would allocate there."""

    def __init__(self, owners: Owners, capability: tuple[int, int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.records: list[Record] = []
        self.events: list[Event] = []
        self._owners = owners
        self.results = Results()
        owners.record_of = self.record_of
        self._live: dict[int, tuple[Record, weakref.ref[Any]]] = {}
        self._cublas_bytes = cublas_workspace_bytes(capability)
        self._threads_with_workspace: set[bool] = set()
        self._is_quiet = False
        self._attending: _Attending | None = None

    def record_of(self, tensor: Tensor) -> Record | None:
        """Return the record of a tensor's storage, None for one of the host's."""
        found = self._live.get(tensor.untyped_storage()._cdata) if isinstance(tensor, CardTensor) else None
        return None if found is None else found[0]

    def note_results(self, results: Any, operator: str) -> None:
        """Note those storages among the results that are new."""
        for result in tree_leaves(results):
            if isinstance(result, CardTensor):
                self._note(result, operator)

    def note_temporary(self, size_bytes: int, operator: str, category: Category = "workspace") -> Record:
        """Note room that no tensor stands for; its death is for the caller to note."""
        record = self._owners.born(
            len(self.records), (size_bytes, (size_bytes,), "uint8"), operator, category
        )
        self.records.append(record)
        self.events.append(Born(record.id))
        return record

    @contextmanager
    def quiet(self, is_quiet: bool = True) -> Iterator[None]:
        """Note nothing, or something again within that."""
        before, self._is_quiet = self._is_quiet, is_quiet
        try:
            yield
        finally:
            self._is_quiet = before

    @contextmanager
    def attending(self, query: Tensor, key: Tensor) -> Iterator[None]:
        """Let what is born of these now be scores where it is a matrix of both, or larger than either."""
        before, self._attending = self._attending, _Attending(query, key)
        try:
            yield
        finally:
            self._attending = before

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled in a simulation, and torch's guard against it costs as much as an operator.
        return False

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one operator: on the host as it is, on the card in shapes only."""
        if function is _DEVICE:  # two of three calls
            return SIMULATED
        named = dict(kwargs or {})
        device = named.get("device")
        if _has_card(args) or _has_card(named.values()):
            if device is not None and device != SIMULATED:
                return self._to_host(function, args, named)
            return self._on_card(function, args, named)
        if device != SIMULATED:
            return function(*args, **named)
        if function is _TO_COPY:
            return self._to_card(args[0], named)
        return self._on_card(function, args, named)

    def _on_card(self, function: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if function is _SCALAR:
            return self._scalar(args[0])
        steps = STEPS.get(function)
        if steps is not None and not self._is_quiet:
            with self:
                return steps(*args, **named)
        results = self._computed(function, args, named)
        if not self._is_quiet:
            self._note_call(function, args, named, results)
        return results

    def _computed(self, function: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        # The generator is a real one; nothing is drawn.
        named.pop("generator", None)
        try:
            results = self.results.of(_WITHOUT_GENERATOR.get(function, function), args, named)
        except NotImplementedError as error:
            raise CannotSimulate(
                f"torch {torch.__version__} has no shape rule for {function} ({error}); say so to dflash"
            ) from None
        if function._schema.is_mutable:
            self._forget_values(function, args, named)
        elif function in _CONSTANTS or function in _MOVES:
            self._keep_values(function, args, named, results)
        return results

    def _note_call(self, function: Any, args: tuple[Any, ...], named: dict[str, Any], results: Any) -> None:
        packet = function.overloadpacket
        if not function.is_view and function is not _NUMBER:
            self.note_results(results, packet.__name__)
        if packet in PRODUCTS:
            self._note_workspace()
        temporaries = TEMPORARIES.get(function)
        if temporaries is not None:
            alive = [self.note_temporary(size, packet.__name__) for size in temporaries(*args, **named)]
            self.events.extend(Died(record.id) for record in alive)

    # -- storages

    def _note(self, tensor: Tensor, operator: str) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        size = storage.nbytes()
        if key in self._live or not size:
            return
        described = (size, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        is_score = self._attending is not None and self._attending.makes(tensor)
        record = self._owners.born(len(self.records), described, operator, "scores" if is_score else None)
        self.records.append(record)
        self.events.append(Born(record.id))
        self._live[key] = (record, weakref.ref(storage, lambda _reference: self._died(key)))

    def _died(self, key: int) -> None:
        record, _ = self._live.pop(key)
        self.events.append(Died(record.id))

    def _note_workspace(self) -> None:
        # Autograd runs a card's backward in a thread of its own, which has a handle of its own.
        is_backward = torch._C._current_autograd_node() is not None
        if is_backward not in self._threads_with_workspace:
            self._threads_with_workspace.add(is_backward)
            self.note_temporary(self._cublas_bytes, "cuBLAS workspace", "cublas")

    # -- between host and card

    def _to_card(self, tensor: Tensor, named: Mapping[str, Any]) -> Tensor:
        dtype = named.get("dtype") or tensor.dtype
        copied = empty_strided(tensor.shape, tensor.stride(), dtype)
        if not dtype.is_floating_point and tensor.numel() <= KEPT_ELEMENTS:
            setattr(copied, _VALUES, tensor.to(dtype))
        if not self._is_quiet:
            self._note(copied, "copy from the host")
        return copied

    def _to_host(self, function: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        known = tree_map_only(CardTensor, self._known, args)
        if any(value is None for value in tree_leaves(known)):
            raise CannotSimulate(
                f"{function} reads from the card what only a run would know; a simulation knows integers "
                "that come from the host or are constant"
            )
        return function(*known, **named)

    def _scalar(self, tensor: Tensor) -> Any:
        known = self._known(tensor)
        if known is not None:
            return known.item()
        return 0.0 if tensor.dtype.is_floating_point else tensor.dtype != torch.bool and 0

    def _known(self, tensor: Tensor) -> Tensor | None:
        values: Tensor | None = getattr(tensor, _VALUES, None)
        if values is None:
            return None
        record = self.record_of(tensor)
        return None if record is not None and record.is_written else values

    def _keep_values(
        self, function: Any, args: tuple[Any, ...], named: Mapping[str, Any], result: Any
    ) -> None:
        if result.dtype.is_floating_point or result.numel() > KEPT_ELEMENTS:
            return
        if function in _MOVES and self._known(args[0]) is None:
            return
        known = tree_map_only(CardTensor, self._known, args)
        on_host = {**named, "device": torch.device("cpu")} if "device" in named else named
        setattr(result, _VALUES, function(*known, **on_host))

    def _forget_values(self, function: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        for place, argument in enumerate(function._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written = named.get(argument.name, args[place] if place < len(args) else None)
                for tensor in tree_leaves(written):
                    record = self.record_of(tensor) if isinstance(tensor, Tensor) else None
                    if record is not None:
                        record.is_written = True


_WITHOUT_GENERATOR = {
    aten.randn.generator: aten.randn.default,
    aten.rand.generator: aten.rand.default,
    aten.randint.generator: aten.randint.default,
    aten.randint.low_generator: aten.randint.low,
    aten.randperm.generator: aten.randperm.default,
}


def _has_card(values: Any) -> bool:
    for value in values:
        if isinstance(value, CardTensor):
            return True
        if isinstance(value, list | tuple) and any(isinstance(part, CardTensor) for part in value):
            return True
    return False
