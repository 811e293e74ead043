"""NVIDIA's management library, as far as cards are chosen and watched: a card's identity, memory, processes,
utilisation and temperature, and its MIG instances.

Functions and structures as in nvml.h of the driver's own documentation. Loading costs some milliseconds and
needs ctypes; a driver installs the library, so that only a host without one, or a stripped Python, lacks it.
"""

import ctypes
from typing import Any, List, NamedTuple, Optional

LIBRARY = "libnvidia-ml.so.1"
TEXT_BYTES = 96
MOST_PROCESSES = 512
MIB = 1024 * 1024
NOT_TOLD = 2**64 - 1
_MEMORY_V2 = 40 | 2 << 24  # a structure's size and version in one number, as the library wants it
_TEMPERATURE_OF_THE_CHIP = 0
_MIG_ENABLED = 1


class NvmlError(Exception):
    """The library is not there, or refuses; the message is its own."""


class Usage(NamedTuple):
    """What a card does at one moment; None is what it does not tell."""

    utilisation_percent: Optional[int]
    temperature_c: Optional[int]


class _MemoryV1(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


class _MemoryV2(ctypes.Structure):
    _fields_ = [
        ("version", ctypes.c_uint),
        *((name, ctypes.c_ulonglong) for name in ("total", "reserved", "free", "used")),
    ]


class _ProcessInfo(ctypes.Structure):
    _fields_ = [
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    ]


class _Utilisation(ctypes.Structure):
    _fields_ = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint)]


class Handle(NamedTuple):
    """A card or one of its MIG instances in the library."""

    pointer: "ctypes.c_void_p"


class Nvml:
    """The library, initialised.

    Raises:
        NvmlError: there is none, or no driver behind it.
    """

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL(LIBRARY)
        except OSError as error:
            raise NvmlError("%s cannot be loaded: %s" % (LIBRARY, error)) from error
        self._call("nvmlInit_v2")

    def handles(self) -> List[Any]:
        """Returns each card's handle in PCI bus order, or in its place the error that it answers with."""
        count = self._number("nvmlDeviceGetCount_v2")
        found: List[Any] = []
        for index in range(count):
            try:
                found.append(self._handle("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index)))
            except NvmlError as error:
                found.append(error)
        return found

    def uuid(self, handle: Handle) -> str:
        """Returns the UUID, with its prefix GPU- or MIG-."""
        return self._text("nvmlDeviceGetUUID", handle)

    def name(self, handle: Handle) -> str:
        """Returns the card's name as it is sold."""
        return self._text("nvmlDeviceGetName", handle)

    def minor(self, handle: Handle) -> int:
        """Returns the N of /dev/nvidiaN."""
        return self._number("nvmlDeviceGetMinorNumber", handle.pointer)

    def memory_mib(self, handle: Handle) -> "tuple[int, int]":
        """Returns (total, in use); what the driver keeps for itself counts as in use for older drivers."""
        try:
            memory = _MemoryV2(version=_MEMORY_V2)
            self._call("nvmlDeviceGetMemoryInfo_v2", handle.pointer, ctypes.byref(memory))
            return memory.total // MIB, memory.used // MIB
        except NvmlError:
            older = _MemoryV1()
            self._call("nvmlDeviceGetMemoryInfo", handle.pointer, ctypes.byref(older))
            return older.total // MIB, older.used // MIB

    def processes(self, handle: Handle) -> "tuple[tuple[int, Optional[int]], ...]":
        """Returns (pid, MiB or None where it is not told) of each process that computes on the card; nobody
        where the driver shows none.

        The pids are those of the driver's PID namespace: in a container they may name nobody, or others.
        """
        count = ctypes.c_uint(MOST_PROCESSES)
        table = (_ProcessInfo * MOST_PROCESSES)()
        try:
            self._call("nvmlDeviceGetComputeRunningProcesses_v3", handle.pointer, ctypes.byref(count), table)
        except NvmlError:
            return ()
        return tuple(
            (entry.pid, None if entry.used == NOT_TOLD else entry.used // MIB)
            for entry in table[: count.value]
        )

    def usage(self, handle: Handle) -> Usage:
        """Returns what the card does now."""
        rates = _Utilisation()
        try:
            self._call("nvmlDeviceGetUtilizationRates", handle.pointer, ctypes.byref(rates))
            utilisation: Optional[int] = rates.gpu
        except NvmlError:
            utilisation = None
        try:
            temperature: Optional[int] = self._number(
                "nvmlDeviceGetTemperature", handle.pointer, ctypes.c_uint(_TEMPERATURE_OF_THE_CHIP)
            )
        except NvmlError:
            temperature = None
        return Usage(utilisation, temperature)

    def has_instances(self, handle: Handle) -> bool:
        """Tells whether the card is in MIG mode, and so computes by its instances alone."""
        current, pending = ctypes.c_uint(), ctypes.c_uint()
        try:
            self._call("nvmlDeviceGetMigMode", handle.pointer, ctypes.byref(current), ctypes.byref(pending))
        except NvmlError:
            return False  # most cards have no such mode
        return current.value == _MIG_ENABLED

    def instances(self, handle: Handle) -> List[Handle]:
        """Returns the MIG instances of a card."""
        found = []
        for index in range(self._number("nvmlDeviceGetMaxMigDeviceCount", handle.pointer)):
            try:
                found.append(
                    self._handle("nvmlDeviceGetMigDeviceHandleByIndex", handle.pointer, ctypes.c_uint(index))
                )
            except NvmlError:
                continue  # a place that holds none
        return found

    def instance_ids(self, instance: Handle) -> "tuple[int, int]":
        """Returns the ids of the GPU instance and of the compute instance in it."""
        return (
            self._number("nvmlDeviceGetGpuInstanceId", instance.pointer),
            self._number("nvmlDeviceGetComputeInstanceId", instance.pointer),
        )

    def _handle(self, function: str, *before: Any) -> Handle:
        pointer = ctypes.c_void_p()
        self._call(function, *before, ctypes.byref(pointer))
        return Handle(pointer)

    def _text(self, function: str, handle: Handle) -> str:
        buffer = ctypes.create_string_buffer(TEXT_BYTES)
        self._call(function, handle.pointer, buffer, ctypes.c_uint(TEXT_BYTES))
        return buffer.value.decode("utf-8", "replace")

    def _number(self, function: str, *before: Any) -> int:
        number = ctypes.c_uint()
        self._call(function, *before, ctypes.byref(number))
        return number.value

    def _call(self, name: str, *arguments: Any) -> None:
        try:
            code = getattr(self._library, name)(*arguments)
        except AttributeError as error:
            raise NvmlError("%s has no %s" % (LIBRARY, name)) from error
        if code != 0:
            describe = self._library.nvmlErrorString
            describe.restype = ctypes.c_char_p
            raise NvmlError((describe(code) or b"error %d" % code).decode("utf-8", "replace"))
