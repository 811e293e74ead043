"""Which NVIDIA cards this host has, and which of them a run asked for.

Cards are asked by index (in PCI bus order, as nvidia-smi counts) or by UUID, and pinned by UUID, so that
``CUDA_VISIBLE_DEVICES`` means the same card whatever else is set. Reads nvidia-smi.
"""

import subprocess
from typing import Any, Dict, List, NamedTuple, Sequence

QUERY_TIMEOUT_S = 30.0
_FIELDS = "index,uuid,name,memory.total,memory.used"


class DeviceError(Exception):
    """The host does not have what was asked for; the message says what it has."""


class Card(NamedTuple):
    """One card; ``number`` in PCI bus order, memory in MiB as nvidia-smi prints it."""

    number: int
    uuid: str
    name: str
    total_mib: int
    used_mib: int


def cards() -> List[Card]:
    """Returns the host's cards in PCI bus order.

    Raises:
        DeviceError: nvidia-smi is missing or fails; the message carries its own words.
    """
    argv = ["nvidia-smi", "--query-gpu=" + _FIELDS, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=QUERY_TIMEOUT_S, check=False
        )
    except FileNotFoundError as error:
        raise DeviceError(
            "nvidia-smi is not there: no NVIDIA driver, or not on PATH; 'devices: none' needs no card"
        ) from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DeviceError("nvidia-smi does not answer: %s" % error) from error
    text = done.stdout.decode("utf-8", "replace")
    if done.returncode != 0:
        said = (text + done.stderr.decode("utf-8", "replace")).strip()
        raise DeviceError("nvidia-smi failed with exit code %d: %s" % (done.returncode, said))
    return [_card(line) for line in text.splitlines() if line.strip()]


def resolve(asked: Sequence[str], present: Sequence[Card]) -> List[Card]:
    """Returns the cards that ``asked`` (indexes or UUIDs, as strings) names, in that order.

    Raises:
        DeviceError: one is not there, or is asked twice.
    """
    found: List[Card] = []
    for name in asked:
        match = [card for card in present if name in (str(card.number), card.uuid)]
        if not match:
            have = ", ".join("%d %s (%s)" % (card.number, card.name, card.uuid) for card in present) or "none"
            raise DeviceError("device %s is not there; this host has: %s" % (name, have))
        if match[0] in found:
            raise DeviceError("device %s is asked for twice" % name)
        found.append(match[0])
    return found


def as_record(chosen: Sequence[Card]) -> List[Dict[str, Any]]:
    """Returns the cards as JSON values."""
    return [
        {
            "index": card.number,
            "uuid": card.uuid,
            "name": card.name,
            "total_mib": card.total_mib,
            "used_mib": card.used_mib,
        }
        for card in chosen
    ]


def _card(line: str) -> Card:
    fields = [field.strip() for field in line.split(",")]
    try:
        index, uuid, name, total, used = (
            int(fields[0]),
            fields[1],
            ",".join(fields[2:-2]),
            fields[-2],
            fields[-1],
        )
        return Card(index, uuid, name, _mib(total), _mib(used))
    except (IndexError, ValueError) as error:
        raise DeviceError("nvidia-smi printed a line that cannot be read: %r" % line) from error


def _mib(text: str) -> int:
    """MIG parents and some boards print [N/A]: counted as 0, never as an error."""
    return int(text) if text.isdigit() else 0
