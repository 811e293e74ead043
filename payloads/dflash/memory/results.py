"""Tensors of a simulated card, and what operators return of them, remembered by what they were given.

Such a tensor has shape, type and a storage of so many bytes that do not exist: torch's own tensors on `meta`,
of which torch knows the results of nearly every operator. Here they say that they are on `cpu:0`, where
autograd works without a card.

A step repeats the same few hundred calls thousands of times, so each is asked of torch once.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from dflash.platforms import SIMULATED

META = torch.device("meta")
_SLICE = torch.ops.aten.slice.Tensor
_AS_STRIDED = torch.ops.aten.as_strided.default
# Operators that take indices and values from the host as well.
_FROM_HOST = {
    torch.ops.aten.copy_.default,
    torch.ops.aten.index.Tensor,
    torch.ops.aten.index_put_.default,
    torch.ops.aten.index_put.default,
}


class CannotSimulate(Exception):
    """This torch, or this work, does something that the simulation does not know; the message says what."""


class CardTensor(Tensor):
    """A tensor on the simulated card."""

    @staticmethod
    def __new__(cls: type[Self], meta: Tensor) -> Self:
        """Return a tensor with the storage, shape and type of one on `meta`."""
        made: Self = Tensor._make_subclass(
            cls, meta, False, dispatch_device=True, device_for_backend_keys=SIMULATED
        )
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The card."""
        return SIMULATED

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuse what happens outside of the simulation.

        Raises:
            CannotSimulate: anything but the question where it is.
        """
        if function is torch.ops.prim.device.default:
            return SIMULATED
        raise CannotSimulate(f"{function} meets a tensor whose simulation has ended")


class _Same(NamedTuple):
    """The result is that argument."""

    argument: int


class _View(NamedTuple):
    """The result looks at that argument's storage, so many elements behind it."""

    argument: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    distance: int
    dtype: torch.dtype


class _New(NamedTuple):
    """The result has a storage of its own, which it fills."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


class _Nothing(NamedTuple):
    """The call returns None."""


_Form = _Same | _View | _New | _Nothing
_Forms = _Form | tuple[_Form, ...]


class Results:
    """The calls that torch has answered."""

    def __init__(self) -> None:
        self._known: dict[Any, _Forms | None] = {}

    def of(self, function: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        """Return what the operator returns."""
        if function is _SLICE and not named:
            # Those of chunks differ from call to call.
            return _slice(*args)
        if function is _AS_STRIDED:  # from where the storage begins
            return _asked(function, args, named)
        return self.remembered(
            function, (*args, *named, *named.values()), lambda: _asked(function, args, named)
        )

    def remembered(self, function: Any, arguments: tuple[Any, ...], call: Callable[[], Any]) -> Any:
        """Return what the call returns, by its form when a call like it has been made before."""
        tensors: list[Tensor] = []
        try:
            key = (function, *_key(arguments, tensors))
        except _Unlike:
            return call()
        forms = self._known.get(key)
        if forms is None:
            results = call()
            if key not in self._known:
                self._known[key] = _forms(results, tensors)
            return results
        if isinstance(forms, _FORM):
            return _formed(forms, tensors)
        return tuple(_formed(form, tensors) for form in forms)


def empty_strided(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> CardTensor:
    """Return a tensor on the card."""
    return CardTensor(torch.empty_strided(shape, strides, dtype=dtype, device=META))


def _asked(function: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
    given: dict[int, Tensor] = {}

    def on_meta(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, CardTensor):
            if tensor.dim() and function not in _FROM_HOST:
                raise RuntimeError(f"{function} is given tensors of the host beside those of a card")
            return tensor.to(META)
        meta = _looking_at(tensor, tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype)
        given[id(meta)] = tensor
        return meta

    def on_card(meta: Tensor) -> Tensor:
        tensor = given.get(id(meta))
        if tensor is None:
            return CardTensor(meta)
        if tensor.shape != meta.shape:
            raise CannotSimulate(f"{function} changes the shape of its argument")
        return tensor

    metas = tree_map_only(Tensor, on_meta, (args, dict(named)))
    if named.get("device") == SIMULATED:
        metas[1]["device"] = META
    return tree_map_only(Tensor, on_card, function(*metas[0], **metas[1]))


def _formed(form: _Form, tensors: Sequence[Tensor]) -> Tensor | None:
    if isinstance(form, _Same):
        return tensors[form.argument]
    if isinstance(form, _New):
        return empty_strided(*form)
    if isinstance(form, _Nothing):
        return None
    base = tensors[form.argument]
    offset = base.storage_offset() + form.distance
    return CardTensor(_looking_at(base, form.shape, form.strides, offset, form.dtype))


def _looking_at(
    base: Tensor, shape: Sequence[int], strides: Sequence[int], offset: Any, dtype: torch.dtype
) -> Tensor:
    view = torch.empty(0, dtype=dtype, device=META)
    looking: Tensor = view.set_(base.untyped_storage(), offset, shape, strides)
    return looking


def _slice(
    base: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> CardTensor:
    shape, strides = list(base.shape), list(base.stride())
    first, last, _ = slice(start, end, step).indices(shape[dim])
    shape[dim] = max(0, -(-(last - first) // step))
    offset = base.storage_offset() + first * strides[dim]
    strides[dim] *= step
    return CardTensor(_looking_at(base, shape, strides, offset, base.dtype))


class _Unlike(Exception):
    """An argument is of a kind that calls are not compared by."""


_FORM = (_Same, _View, _New, _Nothing)
_PLAIN = (
    bool,
    int,
    float,
    str,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)


def _key(values: Any, tensors: list[Tensor]) -> list[Any]:
    """Return what a call's result depends on, and collect its tensors."""
    parts: list[Any] = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
            parts.append((type(value), value.shape, value.stride(), value.dtype))
        elif isinstance(value, list | tuple):
            parts.append(tuple(_key(value, tensors)))
        elif isinstance(value, _PLAIN):
            parts.append((type(value), value))
        else:
            raise _Unlike
    return parts


def _forms(results: Any, tensors: Sequence[Tensor]) -> _Forms | None:
    """Return the form of one result or several, None where one has another."""
    if results is None:
        return _Nothing()
    if not isinstance(results, list | tuple):
        return _form(results, tensors)
    forms = [_form(result, tensors) for result in results]
    return None if None in forms else tuple(form for form in forms if form is not None)


def _form(result: Any, tensors: Sequence[Tensor]) -> _Form | None:
    if type(result) is not CardTensor:
        return None
    storage = result.untyped_storage()
    shape, strides = tuple(result.shape), result.stride()
    for number, tensor in enumerate(tensors):
        if result is tensor:
            return _Same(number)
        if type(tensor) is CardTensor and tensor.untyped_storage()._cdata == storage._cdata:
            if result.element_size() != tensor.element_size():
                return None
            distance = int(result.storage_offset() - tensor.storage_offset())
            return _View(number, shape, strides, distance, result.dtype)
    reach = sum((length - 1) * step for length, step in zip(shape, strides, strict=True)) + 1
    size = result.element_size() * (reach if result.numel() else 0)
    is_filled = result.storage_offset() == 0 and storage.nbytes() == size
    return _New(shape, strides, result.dtype) if is_filled else None
