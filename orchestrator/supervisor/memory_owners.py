"""Whose storages lie where in this process: of modules, gradients and optimizers, and tensors in Python.

Walks objects that live now and keeps names and numbers alone, so that what it has seen once can still be told
when the objects are gone. Of modules and optimizers it keeps weak references.
"""

import gc
import os
import re
import types
import weakref
from typing import Any, Dict, Iterable, Iterator, List, NamedTuple, Optional, Set, Tuple

from .memory_names import CUBLAS_WORKSPACES, LEAST_VOCABULARY, Alive, Known, Owner

_MOST_SITE_NAMES = 2000
_WRAPPERS = (
    "_orig_mod",
    "_fsdp_wrapped_module",
    "_checkpoint_wrapped_module",
)  # which torch puts around modules


class _Found(NamedTuple):
    """Objects that live."""

    modules: List[Any]
    optimizers: List[Any]
    tensors: List[Any]


class Owners:
    """What was seen of the owners of a process's storages on devices of a type."""

    def __init__(self, torch: Any, device_type: str = "cuda") -> None:
        self._torch = torch
        self._device_type = device_type
        self._roots: List[Any] = []
        self._optimizers: List[Any] = []
        self._owners: Dict[int, Owner] = {}
        self._gradient_sizes: Dict[int, int] = {}
        self._vocabularies: Dict[int, Set[int]] = {}
        self._sites: Dict[Tuple[str, str], List[Tuple[int, List[str]]]] = {}
        self._names: Dict[int, str] = {}

    def look(self) -> None:
        """Looks where the storages lie now; searches for modules and optimizers unless those known live."""
        roots = [reference() for reference in self._roots]
        optimizers = [reference() for reference in self._optimizers]
        if not roots or None in roots or None in optimizers:
            self._remember(self._search())
        else:
            self._read(roots, optimizers)

    def look_at_all(self) -> Known:
        """Searches anew, for every tensor too."""
        found = self._search()
        self._remember(found)
        alive: Dict[int, Alive] = {}
        sizes: Dict[int, int] = {}
        with self._torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            for tensor in found.tensors:
                place = self._place(tensor)
                if place is None:
                    continue
                size = tensor.numel() * tensor.element_size()
                if size > sizes.get(place[0], -1):
                    sizes[place[0]] = size
                    alive[place[0]] = Alive(_shape(tensor), _dtype(tensor), tensor.requires_grad)
        return self.seen()._replace(alive=alive)

    def seen(self) -> Known:
        """Returns what was seen, of tensors only those with an owner."""
        return Known(
            owners=dict(self._owners),
            sites=dict(self._sites),
            vocabularies={size: frozenset(others) for size, others in self._vocabularies.items()},
            gradient_sizes=dict(self._gradient_sizes),
            workspaces=CUBLAS_WORKSPACES | _configured_workspace(),
            torch_folder=os.path.dirname(self._torch.__file__),
        )

    @property
    def has_looked(self) -> bool:
        """Something was seen."""
        return bool(self._owners)

    def name_of(self, module: Any) -> Optional[str]:
        """Returns the name of a module that was found; None for the outermost one and for others."""
        return self._names.get(id(module)) or None

    def _search(self) -> _Found:
        """Finds objects by their types, which asks no object anything."""
        kinds: Dict[int, Optional[List[Any]]] = {}
        found = _Found([], [], [])
        lists = (
            (self._torch.nn.Module, found.modules),
            (self._torch.optim.Optimizer, found.optimizers),
            (self._torch.Tensor, found.tensors),
        )
        for thing in gc.get_objects():
            kind = type(thing)
            key = id(kind)
            if key not in kinds:
                kinds[key] = next((into for base, into in lists if base in kind.__mro__), None)
            into = kinds[key]
            if into is not None:
                into.append(thing)
        return found

    def _remember(self, found: _Found) -> None:
        inner = {id(child) for module in found.modules for child in _children(module)}
        roots = [module for module in found.modules if id(module) not in inner]
        self._roots = [weakref.ref(root) for root in roots]
        self._optimizers = [weakref.ref(optimizer) for optimizer in found.optimizers]
        self._read(roots, found.optimizers)

    def _read(self, roots: List[Any], optimizers: List[Any]) -> None:
        """Reads all storages anew, sites only of modules that were not there before."""
        self._owners, self._gradient_sizes = {}, {}
        names: Dict[int, str] = {}
        modules: List[Tuple[str, Any]] = []
        with self._torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            for name, module in self._named(roots):
                modules.append((name, module))
                names[id(module)] = name
                self._read_module(name, module)
            self._read_gradients(modules)
            self._read_optimizers(modules, optimizers)
        if names != self._names:
            self._names = names
            self._sites = _sites(modules, self._torch.nn.Module)

    def _named(self, roots: List[Any]) -> Iterator[Tuple[str, Any]]:
        """Yields modules by name, which begins with the outermost one's class where there are several."""
        holding = [root for root in roots if any(_held(module) for _, module in self._inner(root, ""))]
        for root in holding:
            yield from self._inner(root, type(root).__name__ if len(holding) > 1 else "")

    def _inner(self, root: Any, prefix: str) -> Iterator[Tuple[str, Any]]:
        for name, module in self._torch.nn.Module.named_modules(root, prefix=prefix):
            yield ".".join(part for part in name.split(".") if part not in _WRAPPERS), module

    def _read_module(self, prefix: str, module: Any) -> None:
        for category, tensors in (("parameter", module._parameters), ("buffer", module._buffers)):  # noqa: SLF001
            for name, tensor in tensors.items():
                if tensor is not None and self._add(tensor, category, _joined(prefix, name), prefix):
                    self._note_vocabulary(tensor)

    def _read_gradients(self, modules: Iterable[Tuple[str, Any]]) -> None:
        for prefix, module in modules:
            for name, parameter in module._parameters.items():  # noqa: SLF001
                if parameter is None or not parameter.requires_grad:
                    continue
                if parameter.grad is not None:
                    self._add(parameter.grad, "gradient", _joined(prefix, name), prefix)
                size = parameter.numel() * parameter.element_size()
                self._gradient_sizes[size] = self._gradient_sizes.get(size, 0) + 1

    def _read_optimizers(self, modules: Iterable[Tuple[str, Any]], optimizers: List[Any]) -> None:
        named = {
            id(parameter): (prefix, name)
            for prefix, module in modules
            for name, parameter in module._parameters.items()  # noqa: SLF001
        }
        for optimizer in optimizers:
            for number, group in enumerate(optimizer.param_groups):
                for place, parameter in enumerate(group["params"]):
                    prefix, name = named.get(id(parameter), ("", "param_groups.%d.%d" % (number, place)))
                    self._add(parameter, "parameter", _joined(prefix, name), prefix)
                    state = optimizer.state.get(parameter)
                    for key, value in state.items() if isinstance(state, dict) else ():
                        if isinstance(value, self._torch.Tensor):
                            label = "%s.%s" % (_joined(prefix, name), key)
                            self._add(value, "optimizer_state", label, prefix)

    def _add(self, tensor: Any, category: str, name: str, module: str) -> bool:
        """Notes whose a tensor's storage is, the first of several; tells whether it has one."""
        place = self._place(tensor)
        if place is not None and place[0] not in self._owners:
            shape, dtype = _shape(tensor), _dtype(tensor)
            self._owners[place[0]] = Owner(place[1], category, name, module or None, shape, dtype)
        return place is not None

    def _note_vocabulary(self, tensor: Any) -> None:
        shape = _shape(tensor)
        for size in shape if len(shape) > 1 else ():
            if size >= LEAST_VOCABULARY:
                self._vocabularies.setdefault(size, set()).update(other for other in shape if other != size)

    def _place(self, tensor: Any) -> Optional[Tuple[int, int]]:
        """Returns address and size of a tensor's storage on a device, None for a tensor that has none."""
        try:
            tensor = getattr(tensor, "_local_tensor", tensor)  # a DTensor's part
            plain = self._torch.Tensor.__torch_dispatch__
            if type(tensor).__torch_dispatch__ is not plain or tensor.device.type != self._device_type:
                return None
            storage = tensor.untyped_storage()
            address = storage.data_ptr()
            return (address, storage.nbytes()) if address else None
        except Exception:  # noqa: BLE001  (sparse, functional, freed: they are not told)
            return None


def _children(module: Any) -> Iterable[Any]:
    children: Iterable[Any] = module.__dict__.get("_modules", {}).values()
    return children


def _held(module: Any) -> bool:
    tensors = (*module._parameters.values(), *module._buffers.values())  # noqa: SLF001
    return any(tensor is not None for tensor in tensors)


def _sites(modules: List[Tuple[str, Any]], base: type) -> Dict[Tuple[str, str], List[Tuple[int, List[str]]]]:
    """Returns where the functions of the modules' classes are, up to those that every module has."""
    by_class: Dict[type, List[str]] = {}
    for name, module in modules:
        by_class.setdefault(type(module), []).append(name)
    found: Dict[Tuple[str, str], Dict[int, List[str]]] = {}
    for kind, names in by_class.items():
        for each in kind.__mro__:
            if each is base:
                break
            for code in _codes(each):
                having = found.setdefault((code.co_filename, code.co_name), {})
                having.setdefault(code.co_firstlineno, []).extend(names[:_MOST_SITE_NAMES])
    return {place: sorted(having.items()) for place, having in found.items()}


def _codes(kind: type) -> Iterator[types.CodeType]:
    for function in vars(kind).values():
        while isinstance(function, types.FunctionType) and "__wrapped__" in vars(function):
            function = vars(function)["__wrapped__"]  # noqa: PLW2901  (what a decorator hides)
        if isinstance(function, types.FunctionType):
            yield function.__code__


def _configured_workspace() -> "frozenset[int]":
    """Returns the size that CUBLAS_WORKSPACE_CONFIG asks for: ``:KIB:COUNT``, any number of them."""
    parts = re.findall(r":(\d{1,9}):(\d{1,9})", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    return frozenset([1024 * sum(int(size) * int(count) for size, count in parts)] if parts else [])


def _joined(prefix: str, name: str) -> str:
    return "%s.%s" % (prefix, name) if prefix else name


def _shape(tensor: Any) -> Tuple[int, ...]:
    return tuple(int(size) for size in tensor.shape)


def _dtype(tensor: Any) -> str:
    return str(tensor.dtype).replace("torch.", "")
