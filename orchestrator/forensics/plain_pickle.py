"""Reads pickles of plain containers: dict, list, str, bytes, numbers, bool, None and tuples of integers.

The opcodes that such values need are let through (protocols 2 to 5), and everything else is refused with its
place before anything is built, so that no name is looked up and nothing is called. What then is built grows
with the data alone: at most some ten times its size.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
from typing import Any, NoReturn

from orchestrator.errors import OrchError
from orchestrator.text import quoted

MOST_CONTAINERS = 8_000_000
MOST_TEXTS = 2_000_000
MOST_DEPTH = 16
_INTEGER = rb"K.|M..|J....|" + b"|".join(b"\\x8a%s.{%d}" % (re.escape(bytes([n])), n) for n in range(10))
_OF_FIXED_SIZE = re.compile(
    rb"(?:[(}\])aesuN\x88\x89\x94]++"  # containers and what fills them, None, False, True, into the memo
    rb"|h.|j....|q.|r...\x00"  # what the memo holds, never more of it than there are bytes
    rb"|(?:%(integer)s)(?:\x85|(?:%(integer)s)(?:\x86|(?:%(integer)s)\x87))?"  # and tuples of integers alone
    rb"|G.{8}|\x95.{8}){1,4096}+" % {b"integer": _INTEGER},
    re.DOTALL,
)
_SIZES_OF_LENGTHS = {0x8C: 1, ord("X"): 4, 0x8D: 8, ord("C"): 1, ord("B"): 4, 0x8E: 8}
_MOST_SHOWN = 400  # bytes of a name
_NAMES = {ord(opcode.code): opcode.name for opcode in pickletools.opcodes}
_STOP = ord(".")


class PickleRefused(OrchError):
    """It holds more than plain containers, is damaged, or too large; ``byte`` is the place."""

    def __init__(self, says: str, byte: int) -> None:
        super().__init__(f"byte {byte}: {says}")
        self.byte = byte


def read(data: bytes) -> Any:
    """Returns the value.

    Raises:
        PickleRefused: it is no pickle of plain containers, is damaged, too deep or too large.
    """
    if sum(map(data.count, b"}])\x85\x86\x87")) > MOST_CONTAINERS:  # bytes of numbers and texts count too
        raise PickleRefused(f"it may have more than {MOST_CONTAINERS} containers", len(data))
    _check_opcodes(data)
    try:
        value = _Plain(io.BytesIO(data)).load()
    except PickleRefused:
        raise
    except Exception as error:  # the unpickler raises whatever damaged data leads to
        raise PickleRefused(f"it is damaged: {error}", len(data)) from error
    _check_depth(value, len(data))
    return value


class _Plain(pickle.Unpickler):
    """Looks up nothing, even if an opcode that asks for it came through."""

    def find_class(self, module_name: str, global_name: str, /) -> NoReturn:
        raise PickleRefused(f"it asks for {quoted(f'{module_name}.{global_name}')}", 0)

    def persistent_load(self, pid: Any) -> NoReturn:
        raise PickleRefused(f"it asks for a persistent {quoted(pid)}", 0)


def _check_opcodes(data: bytes) -> None:
    """Goes from opcode to opcode; texts are jumped over, so that nothing in them counts as one."""
    at = _after_protocol(data)
    texts = 0
    before = latest = b""
    while at < len(data):
        if found := _OF_FIXED_SIZE.match(data, at):
            at = found.end()
        elif (opcode := data[at]) in _SIZES_OF_LENGTHS:
            start = at + 1 + _SIZES_OF_LENGTHS[opcode]
            end = start + int.from_bytes(data[at + 1 : start], "little")
            texts += 1
            if end > len(data):
                raise PickleRefused(f"{end - start} bytes are to follow, and it ends before", at)
            if texts > MOST_TEXTS:
                raise PickleRefused(f"it has more than {MOST_TEXTS} texts", at)
            before, latest = latest, data[start : min(end, start + _MOST_SHOWN)]
            at = end
        elif opcode == _STOP:
            if at + 1 != len(data):
                raise PickleRefused("something follows its end", at + 1)
            return
        else:
            _refuse(data, at, [before, latest])
    raise PickleRefused("it ends without its STOP: it is cut off, or no pickle", len(data))


def _after_protocol(data: bytes) -> int:
    if data[:1] != b"\x80" or len(data) < 2:
        raise PickleRefused("it does not begin as a pickle of protocol 2 or later", 0)
    if not 2 <= data[1] <= 5:
        raise PickleRefused(f"protocol {data[1]} is none that is read", 1)
    return 2


def _refuse(data: bytes, at: int, texts: list[bytes]) -> NoReturn:
    name = _NAMES.get(data[at])
    if name is None:
        raise PickleRefused(f"{data[at]:#04x} is no opcode of a pickle", at)
    named = data[at + 1 : at + 1 + _MOST_SHOWN].split(b"\n")[:2]
    words = {"GLOBAL": named, "INST": named, "STACK_GLOBAL": texts}.get(name, [])
    what = "".join(f" {quoted(word.decode('utf-8', 'replace'))}" for word in words)
    raise PickleRefused(f"{name}{what}: only plain containers are read", at)


def _check_depth(value: Any, size: int) -> None:
    """Goes down level by level: what is shared counts once in each, and a cycle has no last one."""
    level = {0: value} if type(value) in (dict, list) else {}
    for _ in range(MOST_DEPTH):
        below = {}
        for outer in level.values():
            for inner in outer.values() if type(outer) is dict else outer:
                if type(inner) is dict or type(inner) is list:
                    below[id(inner)] = inner
        if not below:
            return
        level = below
    raise PickleRefused(f"it is nested more than {MOST_DEPTH} deep, or holds itself", size)
