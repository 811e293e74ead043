"""What torch answers when it is asked for an attention kernel, form by form, and what it then runs.

A form is how a backend could call: with the mask or without, key-value heads grouped (`enable_gqa`),
expanded to the query heads, or the query heads of a group folded into the rows. Tensors ask for gradients, as
in training. The answers are torch's own: whether each fused kernel can be used, with the reasons that it
gives as warnings, the kernel that it chooses, and the operator that a call runs.

Shape letters: n blocks, A query heads, G key-value heads, B slots of a block, K keys, D head_dim.
"""

import contextlib
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode

from dflash.events import emit_warning
from dflash.probes.work import tables
from dflash.probes.work.machine import GIB, open_machine

if TYPE_CHECKING:  # that module is __main__ while this one runs
    from dflash.probes.dispatch import DispatchParams

ASKED_BLOCKS, ASKED_CONTEXT = 2, 224
FUSED_KERNELS = ("flash", "efficient", "cudnn")
HEADS = ("grouped", "expanded", "folded")
MATH, FAILED = "math", "failed: "
FLOAT32_BYTES = 4
STDERR_FD = 2
TRIGGERED_AT = re.compile(r"\s*\(Triggered internally at .*", re.DOTALL)
WARNED_IN_CPP = re.compile(rb"\[W[^\]]*\] Warning: (.*?)(?: \(function \w+\))?\s*$")


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """One way to call: `heads` is one of HEADS."""

    heads: str
    is_masked: bool

    @property
    def name(self) -> str:
        """The form's name in metrics."""
        return f"{'masked' if self.is_masked else 'unmasked'}_{self.heads}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """The arguments of one call."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    mask: Tensor | None
    enable_gqa: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What torch says to a call: its choice, what ran, and what speaks against each other fused kernel."""

    chosen: str
    ran: str
    is_fused: bool
    against: dict[str, str]


def run(params: "DispatchParams") -> int:
    """Ask about every form in every type and print what torch answers."""
    machine = open_machine(params.device)
    print(f"DFlash attention dispatch · torch {torch.__version__} · {machine.describe()}")
    rows, refusals = [], []
    for form in forms():
        held_gib = math_gib(form, params)
        tables.emit(form.name, {"math_gib": held_gib})
        for dtype in params.dtypes:
            answer = ask(call_of(form, params, getattr(torch, dtype), machine.device))
            tables.emit(f"{form.name}.{dtype}", {"is_fused": int(answer.is_fused)})
            rows.append((form.name, dtype, answer.chosen, answer.ran, f"{held_gib:.2f}"))
            refusals += [
                f"{form.name} {dtype}: not {kernel}: {why}" for kernel, why in answer.against.items()
            ]
    tables.print_table(("form", "dtype", "chosen", "ran", "keys and values each in the math path, GiB"), rows)
    print("\n".join(refusals or ["torch gives reasons on a GPU only"]))
    return 0


def forms() -> Iterator[Form]:
    """Return every form; without a mask nothing has to be folded."""
    for is_masked in (True, False):
        for heads in HEADS if is_masked else HEADS[:2]:
            yield Form(heads=heads, is_masked=is_masked)


def math_gib(form: Form, params: "DispatchParams") -> float:
    """Return what a chunk's keys take in the math path, `[n, heads, S + B, D]` in float32; values as much."""
    heads = params.num_key_value_heads if form.heads == "folded" else params.num_attention_heads
    keys = params.seq_len + params.block_size
    return params.chunk_blocks * heads * keys * params.head_dim * FLOAT32_BYTES / GIB


def call_of(form: Form, params: "DispatchParams", dtype: torch.dtype, device: torch.device) -> Call:
    """Return a small call of that form."""
    group = params.num_attention_heads // params.num_key_value_heads
    query_heads, rows = params.num_attention_heads, params.block_size
    if form.heads == "folded":
        query_heads, rows = params.num_key_value_heads, rows * group
    key_heads = query_heads if form.heads == "expanded" else params.num_key_value_heads
    keys = ASKED_CONTEXT + params.block_size

    def tensor(heads: int, length: int) -> Tensor:
        shape = (ASKED_BLOCKS, heads, length, params.head_dim)
        return torch.randn(shape, dtype=dtype, device=device).requires_grad_()

    return Call(
        queries=tensor(query_heads, rows),
        keys=tensor(key_heads, keys),
        values=tensor(key_heads, keys),
        mask=torch.ones(ASKED_BLOCKS, 1, rows, keys, dtype=torch.bool, device=device)
        if form.is_masked
        else None,
        enable_gqa=form.heads == "grouped",
    )


def ask(call: Call) -> Answer:
    """Return what torch answers to a call."""
    chosen, ran = _chosen(call), _ran(call)
    others = [kernel for kernel in FUSED_KERNELS if kernel != chosen and call.queries.is_cuda]
    return Answer(
        chosen=chosen,
        ran=ran,
        is_fused=ran != MATH and not ran.startswith(FAILED),
        against={kernel: _against(kernel, call) or f"it can, but {chosen} comes first" for kernel in others},
    )


def _chosen(call: Call) -> str:
    choose = getattr(torch, "_fused_sdp_choice", None)
    if choose is None:
        return "not told"
    number = choose(
        call.queries,
        call.keys,
        call.values,
        attn_mask=call.mask,
        dropout_p=0.0,
        is_causal=False,
        enable_gqa=call.enable_gqa,
    )
    return SDPBackend(number).name.lower().removesuffix("_attention")


def _against(kernel: str, call: Call) -> str | None:
    """Return why a fused kernel of CUDA cannot take the call, None where it can."""
    can_use = getattr(torch.backends.cuda, f"can_use_{kernel}_attention", None)
    if can_use is None:
        return "this torch cannot be asked"
    asked = torch.backends.cuda.SDPAParams(
        call.queries, call.keys, call.values, call.mask, 0.0, False, call.enable_gqa
    )
    with _told() as reasons:
        can = can_use(asked, debug=True)
    return None if can else "; ".join(reasons) or "no reason told"


@contextlib.contextmanager
def _told() -> Iterator[list[str]]:
    """Collect what torch warns of, as Python's warnings or past them on standard error.

    torch 2.11 asks these questions outside its own translation of warnings, so their C++ text goes straight
    to the descriptor; what else is written there meanwhile is passed on.
    """
    told: list[str] = []
    sys.stderr.flush()
    kept = os.dup(STDERR_FD)
    try:
        with tempfile.TemporaryFile() as file, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            os.dup2(file.fileno(), STDERR_FD)
            try:
                yield told
            finally:
                os.dup2(kept, STDERR_FD)
                told += [TRIGGERED_AT.sub("", str(warning.message)) for warning in caught]
                file.seek(0)
                for line in file:
                    told_there = WARNED_IN_CPP.match(line)
                    if told_there:
                        told.append(told_there[1].decode(errors="replace"))
                    else:
                        os.write(STDERR_FD, line)
    finally:
        os.close(kept)


class _Operators(TorchDispatchMode):
    """Notes the fused attention operators that run; the math path is made of others."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fused: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if name.startswith("_scaled_dot_product"):
            self.fused.append(name.removeprefix("_scaled_dot_product_").replace("_attention", ""))
        return function(*args, **(kwargs or {}))


def _ran(call: Call) -> str:
    try:
        with _Operators() as operators:
            functional.scaled_dot_product_attention(
                call.queries, call.keys, call.values, attn_mask=call.mask, enable_gqa=call.enable_gqa
            )
    except RuntimeError as error:
        emit_warning("dispatch", str(error))
        return FAILED + str(error).splitlines()[0]
    return operators.fused[0] if operators.fused else MATH
