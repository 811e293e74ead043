"""Whose a storage is: module, phase, line and name, from hooks that every module and optimizer carries.

Names are known late: a module learns its own when the outermost one is first called, a gradient its
parameter's when it has been added. So a record is completed after its birth, and becomes a block at the end.
"""

import contextlib
import math
import os
import sys
import sysconfig
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks
from torch.optim import optimizer as optimizer_hooks

from dflash.memory.log import Block, Category, Phase
from dflash.platforms import simulation

# Parts of a layer that are functions, and whose weights they use.
MODULE_OF_FILE = {"feed_forward.py": "mlp"}
# Where everything of some size is scores, or keys and values expanded for them.
SCORES_MADE_BY = {"EagerAttention.__call__", "MathAttention._copies"}
# Helpers whose callers say more.
TRANSPARENT = {"compiling.py", "derivatives.py", "transfer.py", "gathering.py"}

_FOREIGN = tuple(
    f"{folder}{os.sep}"
    for folder in (Path(torch.__file__).parent, Path(__file__).parent, sysconfig.get_paths()["stdlib"])
)


@dataclass(eq=False, slots=True)
class Label:
    """A module's name, once it is known."""

    name: str | None = None


@dataclass(eq=False, slots=True)
class Record:
    """A block in the making."""

    id: int
    bytes: int
    shape: tuple[int, ...]
    dtype: str
    operator: str
    phase: Phase
    label: Label | None
    part: str | None
    where: str | None
    category: Category | None = None
    name: str | None = None
    is_written: bool = False

    def block(self) -> Block:
        """Return it as a value."""
        born_in: dict[Phase, Category] = {
            "setup": "unnamed",
            "forward": "activation",
            "backward": "temporary",
            "optimizer": "temporary",
        }
        module = None if self.label is None else self.label.name
        if self.part is not None and module is not None and not module.endswith(self.part):
            module = f"{module}.{self.part}" if module else self.part
        return Block(
            id=self.id,
            bytes=self.bytes,
            shape=self.shape,
            dtype=self.dtype,
            category=self.category or born_in[self.phase],
            name=self.name or self.operator,
            module=module,
            where=self.where,
            phase=self.phase,
        )


class Owners:
    """What is running, and the names of what was made."""

    def __init__(self, started: Callable[[nn.Module], None]) -> None:
        self.record_of: Callable[[Tensor], Record | None] = lambda _tensor: None
        self._started = started
        self._labels: weakref.WeakKeyDictionary[nn.Module, Label] = weakref.WeakKeyDictionary()
        self._roots: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._running: list[tuple[Label, int]] = []
        self._finished: list[tuple[int, int, Label]] = []
        self._label_of_node: dict[int, Label | None] = {}
        self._in_optimizer = False
        self._vocabulary: int | None = None
        self._score_elements: set[int] = set()
        self._places: dict[CodeType, tuple[str, str] | None] = {}

    # -- what is running now

    def born(
        self,
        number: int,
        described: tuple[int, tuple[int, ...], str],
        operator: str,
        category: Category | None,
    ) -> Record:
        """Return the record of a new storage of so many bytes, for a tensor of that shape and type."""
        node = torch._C._current_autograd_node()
        frame, place = self._place(sys._getframe(1))
        record = Record(
            id=number,
            bytes=described[0],
            shape=described[1],
            dtype=described[2],
            operator=operator,
            phase=self._phase(node),
            label=self._label(node),
            part=None if place is None else MODULE_OF_FILE.get(place[0]),
            where=None
            if place is None or frame is None
            else f"{place[0]}:{frame.f_lineno} {frame.f_code.co_name}",
        )
        function = None if place is None else place[1]
        record.category = category or self._category(record, function)
        if record.category == "scores":
            self._score_elements.add(math.prod(record.shape))
        return record

    def _phase(self, node: Any) -> Phase:
        if self._in_optimizer:
            return "optimizer"
        if node is not None:
            return "backward"
        return "forward" if self._running else "setup"

    def _label(self, node: Any) -> Label | None:
        if self._running:
            return self._running[-1][0]
        if node is None:
            return None
        number = node._sequence_nr()
        if number not in self._label_of_node:
            self._label_of_node[number] = next(
                (label for first, end, label in self._finished if first <= number < end), None
            )
        return self._label_of_node[number]

    def _category(self, record: Record, function: str | None) -> Category | None:
        if record.phase == "setup":
            return None
        if len(record.shape) >= 2 and record.shape[-1] == self._vocabulary:
            return "logits"
        if len(record.shape) < 3:
            return None
        # Autograd's own steps have no line of the payload; their gradients are as large as what forward made.
        is_gradient = record.phase == "backward" and math.prod(record.shape) in self._score_elements
        return "scores" if is_gradient or function in SCORES_MADE_BY else None

    def _place(self, frame: FrameType | None) -> tuple[FrameType | None, tuple[str, str] | None]:
        while frame is not None:
            code = frame.f_code
            if code not in self._places:
                self._places[code] = _place_of(code)
            place = self._places[code]
            if place is not None:
                return frame, place
            frame = frame.f_back
        return None, None

    # -- hooks

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch modules and optimizers that are made, called, stepped."""

        def only_here(hook: Callable[..., None]) -> Callable[..., None]:
            # The hooks are the whole process's, the simulation is one thread's.
            return lambda *arguments: None if simulation() is None else hook(*arguments)

        registrations = (
            module_hooks.register_module_parameter_registration_hook(
                only_here(lambda module, _name, _parameter: self._watch(module))
            ),
            module_hooks.register_module_module_registration_hook(
                only_here(lambda module, _name, child: self._watch(module, child))
            ),
            optimizer_hooks.register_optimizer_step_pre_hook(only_here(self._before_step)),
            optimizer_hooks.register_optimizer_step_post_hook(only_here(self._after_step)),
        )
        try:
            yield
        finally:
            for registration in registrations:
                registration.remove()

    def _watch(self, *modules: nn.Module | None) -> None:
        for module in modules:
            if module is not None and module not in self._labels:
                self._labels[module] = Label()
                module.register_forward_pre_hook(self._before, with_kwargs=True)
                module.register_forward_hook(self._after, always_call=True)

    def _before(self, module: nn.Module, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        if not self._running and torch._C._current_autograd_node() is None:
            self._meet(module, {**{str(place): part for place, part in enumerate(arguments)}, **named})
        self._running.append((self._labels[module], _next_node()))

    def _after(self, _module: nn.Module, _arguments: Any, _result: Any) -> None:
        label, first = self._running.pop()
        self._finished.append((first, _next_node(), label))

    def _meet(self, root: nn.Module, inputs: Mapping[str, Any]) -> None:
        """Learn the names of everything that belongs to the outermost module of a call, and of its inputs."""
        self._finished.clear()
        self._label_of_node.clear()
        for name, value in inputs.items():
            self._name(value, "input", name)
        if root in self._roots:
            return
        self._roots.add(root)
        self._started(root)
        self._vocabulary = getattr(getattr(root, "config", None), "vocab_size", None)
        for name, module in root.named_modules():
            self._watch(module)
            label = self._labels[module]
            label.name = name or type(root).__name__
            prefix = f"{name}." if name else ""
            for own, parameter in module.named_parameters(recurse=False):
                self._name(parameter, "parameter", prefix + own, label)
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(self._gradient_added)
            for own, buffer in module.named_buffers(recurse=False):
                self._name(buffer, "buffer", prefix + own, label)

    def _gradient_added(self, parameter: Tensor) -> None:
        owner = self.record_of(parameter)
        if owner is not None:
            self._name(parameter.grad, "gradient", owner.name, owner.label)

    def _name(self, value: Any, category: Category, name: str | None, label: Label | None = None) -> None:
        record = self.record_of(value) if isinstance(value, Tensor) else None
        if record is not None and record.category not in {"parameter", "buffer"}:
            record.category, record.name = category, name
            if label is not None:
                record.label, record.part = label, None

    def _before_step(self, optimizer: torch.optim.Optimizer, _arguments: Any, _named: Any) -> None:
        self._in_optimizer = True
        for group in optimizer.param_groups:
            # torch's own default on CUDA, which it does not take for tensors that say they are on a CPU.
            if group.get("foreach") is None and not group.get("fused"):
                group["foreach"] = True

    def _after_step(self, optimizer: torch.optim.Optimizer, _arguments: Any, _named: Any) -> None:
        self._in_optimizer = False
        for parameter, state in optimizer.state.items():
            owner = self.record_of(parameter)
            of = "" if owner is None or owner.name is None else f" of {owner.name}"
            for key, value in state.items():
                self._name(value, "optimizer_state", f"{key}{of}", None if owner is None else owner.label)


def _next_node() -> int:
    """Return the number that the next node of autograd's graph will get in this thread."""
    return int(torch._C._autograd._get_sequence_nr())


def _place_of(code: CodeType) -> tuple[str, str] | None:
    """Return file and qualified name of a function of the payload's, None for one of torch's or ours."""
    name = Path(code.co_filename).name
    if code.co_filename.startswith((*_FOREIGN, "<")) or name in TRANSPARENT:
        return None
    return name, code.co_qualname
