"""Single fields of the YAML files as checked values: variables, a module, devices, numbers, durations, sizes
(stdlib only).

Knows which values are acceptable, not where they stand: a refusal is a `UsageError` that reads on after the
field's name, which the caller puts before it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from orchestrator.errors import UsageError
from orchestrator.supervisor import ranks
from orchestrator.text import did_you_mean, quoted

__all__ = [
    "CardCount",
    "Devices",
    "Secret",
    "check_free_of_ranks",
    "check_module",
    "check_variable",
    "devices_json",
    "devices_text",
    "parse_device",
    "parse_devices",
    "parse_duration",
    "parse_grace",
    "parse_memory",
    "parse_processes",
    "parse_size",
    "parse_variable",
]

MIN_SECRET_BYTES = 8  # shorter ones stand in any log by chance
MAX_SECRET_BYTES = 16 * 1024

_MAX_VARIABLE_BYTES = 128 * 1024  # the kernel's limit for one NAME=value string of execve
_LONGEST_S = 2**31 - 1
_LONGEST_GRACE_S = 7 * 86400  # the most that a supervisor accepts

_RESERVED = {
    "PYTORCH_CUDA_ALLOC_CONF": "use alloc_conf:",
    "PYTORCH_ALLOC_CONF": "use alloc_conf:",
    "CUDA_VISIBLE_DEVICES": "use devices:",
    "NVIDIA_VISIBLE_DEVICES": "use devices:",
    "PYTHONPATH": "it is the run's bundle; put the code into the payload",
}
_SWITCHES = ("ORCH_MEMORY_HISTORY",)  # see supervisor/instrument.py

_HEX_UUID = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_UUID = (
    rf"(?:GPU|MIG)-{_HEX_UUID}|MIG-GPU-{_HEX_UUID}/[0-9]{{1,3}}/[0-9]{{1,3}}"  # the last as before driver 470
)
_MOST_CARDS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Secret:
    """A variable whose value is that of ``from_env`` here when a run starts; ``where`` it is asked for."""

    name: str
    from_env: str
    where: str

    def read(self, environ: Mapping[str, str]) -> str:
        """Returns the value.

        Raises:
            UsageError: there is none, or one that could not be masked in a log.
        """
        try:
            return _check_secret(environ.get(self.from_env))
        except UsageError as error:
            text = f"the secret {self.from_env} {error}; set it where you call orch"
            raise UsageError(f"{self.where}: env.{self.name}: {text}") from None


@dataclass(frozen=True, kw_only=True, slots=True)
class CardCount:
    """Any ``count`` cards of a host, with at least so much memory free on each where that is asked for."""

    count: int
    free_bytes: int | None = None


Devices = tuple[str, ...] | CardCount
"""Which cards a run gets: by index or UUID, or so many; empty for none."""


def check_module(module: str, *, payload: str) -> str:
    """Returns the dotted module that ``python -m`` will run, which lies in the payload's own package.

    Raises:
        UsageError: not a dotted name, or of another package than ``payload``.
    """
    parts = module.split(".")
    if not all(part.isascii() and part.isidentifier() for part in parts):
        dotted = re.sub(r"\.py$", "", module).replace("/", ".")
        hint = f"; write {quoted(dotted)}" if "/" in module and dotted.replace(".", "").isidentifier() else ""
        raise UsageError(f"{quoted(module)} is no dotted module name{hint}")
    if parts[0] != payload:
        raise UsageError(
            f"{quoted(module)} is not in the payload {payload!r}: its name must begin with '{payload}.', or "
            f"payload: be {quoted(parts[0])}"
        )
    return module


def check_variable(name: str, value: object) -> str:
    """Returns the value of an environment variable; no message shows it, since it may be a secret.

    Raises:
        UsageError: a name that is none or reserved, a value that is no text or that no process can get.
    """
    _check_variable_name(name)
    if isinstance(value, bool):
        text = str(value).lower()
        raise UsageError(f"is a boolean, a variable is text: quote it as '{text}' or '{int(value)}'")
    if not isinstance(value, str):
        raise UsageError("must be text: put its value in quotes")
    if name in _SWITCHES and value not in ("0", "1"):
        raise UsageError("is a switch: use '0' or '1', in quotes")
    if "\0" in value:
        raise UsageError("holds a NUL character, which no environment can carry")
    try:
        size_bytes = len(f"{name}={value}".encode()) + 1
    except UnicodeEncodeError:
        raise UsageError("holds a lone surrogate, which is no text") from None
    if size_bytes > _MAX_VARIABLE_BYTES:
        raise UsageError(f"is longer than the {_MAX_VARIABLE_BYTES // 1024} KiB that one variable may have")
    return value


def parse_variable(name: str, value: object, *, where: str) -> str | Secret:
    """Returns a variable's text, or the `Secret` that ``{secret: true, from_env: NAME}`` asks for.

    Raises:
        UsageError: as `check_variable`, or a mapping of another form.
    """
    if not isinstance(value, Mapping):
        return check_variable(name, value)
    _check_variable_name(name)
    if name in _SWITCHES:
        raise UsageError("is a switch and no secret: use '0' or '1', in quotes")
    for key in value:
        if key not in ("secret", "from_env"):
            hint = did_you_mean(key, ("secret", "from_env"))
            raise UsageError(f"unknown key {quoted(key)}; a secret is {{secret: true, from_env: NAME}}{hint}")
    from_env = value.get("from_env")
    if value.get("secret") is not True or not isinstance(from_env, str):
        raise UsageError("must be text, or a secret such as {secret: true, from_env: NAME}")
    if not re.fullmatch(r"[A-Z_][A-Z0-9_]*", from_env):  # capitals alone: a token is hardly ever that
        raise UsageError("from_env must be a variable's name in capitals, never the value itself")
    return Secret(name=name, from_env=from_env, where=where)


def parse_device(value: object) -> str:
    """Returns one device as an index ("5"), or as the UUID of a card or of a MIG instance.

    Raises:
        UsageError: anything else; ``cuda:5`` counts inside a process and names no card.
    """
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if isinstance(text, str):
        spelt = text[:4].upper() + text[4:].lower() if text[:4].upper() == "GPU-" else text
        if re.fullmatch(r"0|[1-9][0-9]{0,3}", text) or re.fullmatch(_UUID, spelt):
            return spelt
        if index := re.fullmatch(r"(?:cuda:|/dev/nvidia)([0-9]{1,4})", text):
            raise UsageError(f"{text!r} is no device of a host; write {index[1]}")
    raise UsageError(
        f"{quoted(value)} is no device: use an index such as 5, or a UUID such as GPU-… or MIG-…"
    )


def parse_devices(value: object) -> Devices:
    """Returns the devices of ``"none"`` (no device), of a list, in its order, or of a mapping such as
    ``{count: 2, free_memory: 90GiB}``.

    Raises:
        UsageError: none of these, an empty list, or one device twice.
    """
    if value == "none":
        return ()
    if isinstance(value, Mapping):
        return _card_count(value)
    if not isinstance(value, list) or not value:
        hint = f", for example [{value}]" if isinstance(value, int) and not isinstance(value, bool) else ""
        raise UsageError(f"must be 'none', a list of indexes or UUIDs, or {{count: N}}{hint}")
    devices = tuple(map(parse_device, value))
    for position, device in enumerate(devices):
        if device in devices[:position]:
            raise UsageError(f"{device} is listed twice")
    return devices


def devices_json(devices: Devices) -> list[str] | dict[str, int | None]:
    """Returns the form that stands in a job."""
    return asdict(devices) if isinstance(devices, CardCount) else list(devices)


def devices_text(stated: object) -> str:
    """Returns for a person what a job says of devices, whoever wrote it."""
    if isinstance(stated, Mapping):
        free = stated.get("free_bytes")
        with_free = f" with {free / 1024**3:g} GiB free" if isinstance(free, int) else ""
        return f"any {stated.get('count')}{with_free}"
    return ", ".join(map(str, stated)) if isinstance(stated, list | tuple) and stated else "none"


def _card_count(value: Mapping[Any, Any]) -> CardCount:
    for key in value:
        if key not in ("count", "free_memory"):
            hint = did_you_mean(str(key), ("count", "free_memory"))
            raise UsageError(f"unknown key {quoted(key)}; use {{count: 2, free_memory: 90GiB}}{hint}")
    count = value.get("count")
    if type(count) is not int or not 1 <= count <= _MOST_CARDS:
        raise UsageError(f"count must be a number of cards from 1 to {_MOST_CARDS}, not {quoted(count)}")
    free = value.get("free_memory")
    return CardCount(count=count, free_bytes=None if free is None else parse_memory(free))


def parse_processes(value: object) -> int:
    """Returns how many processes a run has, from a number or its text.

    Raises:
        UsageError: anything else, or not 1 to 64.
    """
    number = int(value) if isinstance(value, str) and re.fullmatch(r"[0-9]{1,3}", value) else value
    if type(number) is not int or not 1 <= number <= ranks.MOST_RANKS:
        raise UsageError(f"{quoted(value)} is no number of processes: use 1 to {ranks.MOST_RANKS}")
    return number


def check_free_of_ranks(names: Iterable[str], processes: int) -> None:
    """Accepts variables that do not say what each of several processes is told by orch.

    Raises:
        UsageError: one does.
    """
    for name in names:
        if processes > 1 and name in ranks.VARIABLES:
            raise UsageError(f"{name} is set by orch for each of {processes} processes: take it out of env")


def parse_duration(value: object) -> float:
    """Returns seconds from a number or from text such as "90s", "1.5m", "2h", "1d".

    Raises:
        UsageError: anything else, or not more than zero.
    """
    seconds = math.nan
    if isinstance(value, int | float) and not isinstance(value, bool):
        seconds = float(value) if abs(value) < _LONGEST_S else math.nan
    elif isinstance(value, str) and (
        match := re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) ?([smhd]?)", value)
    ):
        seconds = float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]
    if not seconds > 0:
        raise UsageError(
            f"{quoted(value)} is no duration: use seconds, or text such as 90s, 10m, 2h (more than 0)"
        )
    return seconds


def parse_grace(value: object) -> float:
    """Returns seconds as `parse_duration` does, from 0 (kill at once) to 7 days.

    Raises:
        UsageError: anything else.
    """
    is_zero = value == 0 and not isinstance(value, bool)
    seconds = 0.0 if is_zero or value in ("0", "0s") else parse_duration(value)
    if seconds > _LONGEST_GRACE_S:
        raise UsageError(f"{quoted(value)} is too long a grace: use at most 7d")
    return seconds


def parse_size(value: object) -> int:
    """Returns bytes from text such as "512MiB" or "2GiB".

    Raises:
        UsageError: anything else, a number without its unit too: nobody could tell which it has.
    """
    match = (
        re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) ?([KMGT])iB", value) if isinstance(value, str) else None
    )
    if match is None:
        raise UsageError(f"{quoted(value)} is no size: use a number with KiB, MiB, GiB or TiB, such as 2GiB")
    return int(float(match[1]) * 1024 ** ("KMGT".index(match[2]) + 1))


def parse_memory(value: object) -> int:
    """Returns bytes as `parse_size` does, more than none.

    Raises:
        UsageError: anything else.
    """
    limit = parse_size(value)
    if not limit:
        raise UsageError("must be more than 0")
    return limit


def _check_secret(value: str | None) -> str:
    if value is None:
        raise UsageError("is not in this environment")
    try:
        size_bytes = len(value.encode())
    except UnicodeEncodeError:
        raise UsageError("is not UTF-8") from None
    if not MIN_SECRET_BYTES <= size_bytes <= MAX_SECRET_BYTES:
        limits = f"{MIN_SECRET_BYTES} to {MAX_SECRET_BYTES} bytes"
        raise UsageError(f"has {size_bytes} bytes, and only values of {limits} can be kept out of a log")
    if not value.isprintable():
        raise UsageError("holds a line break or another control character, as no token does")
    return value


def _check_variable_name(name: str) -> None:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise UsageError("is no name for an environment variable: use letters, digits and '_'")
    if name in _RESERVED:
        raise UsageError(f"is set by orch: {_RESERVED[name]}")
    if name.startswith("ORCH_") and name not in _SWITCHES:
        raise UsageError("is reserved: names that begin with ORCH_ carry the run's identity")
