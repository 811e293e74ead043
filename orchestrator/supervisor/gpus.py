"""Which NVIDIA cards this host has, how they stand, and which of them a run asks for.

Cards are asked by index (in PCI bus order, as nvidia-smi counts), by UUID, or as a number of cards with so
much free memory; they are pinned by UUID, so that ``CUDA_VISIBLE_DEVICES`` means the same card whatever else
is set. A MIG instance counts as a card of its own, asked by its UUID. Reads the driver's library, or
nvidia-smi where that cannot be loaded.
"""

import glob
import re
import subprocess
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

QUERY_TIMEOUT_S = 30.0
MOST_NAMED = 4
BUSY_MIB = 1024  # idle cards show up to some hundred MiB of the driver's own
DRIVER = "/proc/driver/nvidia"
_FIELDS = "index,uuid,name,memory.total,memory.used,mig.mode.current"
_INSTANCE = re.compile(r"\s+(MIG .*?)\s+Device\s+[0-9]+: \(UUID: (MIG-[^)]+)\)")
_MIB = 1024 * 1024
_UUID = re.compile("(?:GPU|MIG)-[0-9A-Za-z/-]{1,80}")
_MOST_LINES = 256
NO_CARD = -1

Holder = Tuple[int, Optional[int]]


class DeviceError(Exception):
    """The host does not have what was asked for; the message says what it has."""


class Card(NamedTuple):
    """One card, or one MIG instance of the card ``number``.

    ``number`` in PCI bus order, memory in MiB, ``node`` the file under /dev that stands for it, where one is
    known; ``processes`` as (pid, MiB or None) where the driver shows them. A card ``has_instances`` when it
    is in MIG mode. ``fault``: why it does not answer; such a card has no UUID.
    """

    number: int
    uuid: str
    name: str
    total_mib: int
    used_mib: int
    node: Optional[str] = None
    processes: Tuple[Holder, ...] = ()
    is_instance: bool = False
    has_instances: bool = False
    fault: Optional[str] = None

    @property
    def free_mib(self) -> int:
        """What nobody has in use."""
        return self.total_mib - self.used_mib

    @property
    def label(self) -> str:
        """Its number and name, and of an instance, of which a card has several alike, the UUID."""
        return "%d (%s%s)" % (self.number, self.name, " " + self.uuid if self.is_instance else "")

    def __str__(self) -> str:
        """Returns it as a listing names it."""
        if self.number == NO_CARD:
            return str(self.fault)
        return "%d %s (%s)" % (self.number, self.name, self.uuid or self.fault)


class Asked(NamedTuple):
    """What a run asks for: cards by ``names``, or any ``number`` of cards with ``free_mib`` each."""

    names: Tuple[str, ...] = ()
    number: int = 0
    free_mib: int = 0

    @classmethod
    def of(cls, devices: Any) -> "Optional[Asked]":
        """Reads a job's ``devices``; None for no card."""
        if isinstance(devices, Mapping):
            return cls(number=devices["count"], free_mib=-(-(devices.get("free_bytes") or 0) // _MIB))
        return cls(names=tuple(devices)) if devices else None

    def candidates(self, present: Sequence[Card]) -> List[Card]:
        """Returns the cards that can serve it at some time: those it names, in order, or all large enough.

        Raises:
            DeviceError: one is not there, does not answer, cannot be used as a whole or is asked twice; or
                there will never be enough cards.
        """
        if self.names:
            return _named(self.names, present)
        fit = [
            card
            for card in present
            if not (card.fault or card.has_instances or card.is_instance) and card.total_mib >= self.free_mib
        ]
        if len(fit) < self.number:
            size = " of %s" % gib(self.free_mib) if self.free_mib else ""
            asked = "%d card%s%s asked for" % (self.number, "" if self.number == 1 else "s", size)
            raise DeviceError("%s; this host has: %s" % (asked, _listing(present)))
        return fit

    def occupied(self, card: Card) -> Optional[str]:
        """Returns who is in the way on a card that no run of ours holds, None when nobody is.

        Memory asked for is all that counts then; else every process does, and more memory in use than an idle
        card has.
        """
        if self.free_mib:
            if card.free_mib >= self.free_mib:
                return None
            return "has %s free of %s%s" % (gib(card.free_mib), gib(card.total_mib), _users(card))
        if card.processes or card.used_mib > BUSY_MIB:
            return "has %s in use%s" % (gib(card.used_mib), _users(card))
        return None


def short(text: str, most: int = 400) -> str:
    """Returns the beginning of what a program said, in one line."""
    line = " ".join(text[: 4 * most].split())
    return line if len(line) <= most else line[: most - 1] + "…"


def gib(mib: int) -> str:
    """Returns a size for a person."""
    return "%.1f GiB" % (mib / 1024)


def cards() -> List[Card]:
    """Returns the host's cards in PCI bus order, MIG instances behind their card.

    Raises:
        DeviceError: there is no driver, or it does not answer; the message carries its own words.
    """
    try:
        from . import nvml  # noqa: PLC0415  (a stripped Python may lack ctypes, and few runs need it)

        library = nvml.Nvml()
    except Exception:  # noqa: BLE001  (whatever it is, nvidia-smi says it better)
        return _from_nvidia_smi()
    try:
        return _all_from_nvml(library)
    except nvml.NvmlError as error:
        raise DeviceError("the NVIDIA driver does not answer: %s; see: orch doctor" % error) from error


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


def _named(names: Sequence[str], present: Sequence[Card]) -> List[Card]:
    found: List[Card] = []
    for name in names:
        match = [
            card
            for card in present
            if name == card.uuid or (name == str(card.number) and not card.is_instance)
        ]
        if not match:
            raise DeviceError("card %s is not there; this host has: %s" % (name, _listing(present)))
        card = match[0]
        if card.fault:
            raise DeviceError(
                "card %s does not answer: %s; see the kernel's log there (dmesg)" % (name, card.fault)
            )
        if card.has_instances:
            own = [other.uuid for other in present if other.is_instance and other.number == card.number]
            raise DeviceError(
                "card %s is in MIG mode: ask for one of its instances: %s"
                % (name, ", ".join(own) or "there is none yet, see nvidia-smi mig")
            )
        if card in found:
            raise DeviceError("card %s is asked for twice" % name)
        found.append(card)
    return found


def _listing(present: Sequence[Card]) -> str:
    return ", ".join(map(str, present)) or "none"


def _users(card: Card) -> str:
    """Names the processes on a card, as far as this host shows them."""
    from . import processes  # noqa: PLC0415

    named = []
    for pid, used_mib in card.processes[:MOST_NAMED]:
        words = processes.command_line(pid)
        size = "" if used_mib is None else ", %s" % gib(used_mib)
        named.append("pid %d%s%s" % (pid, " (%s)" % short(words[0], 80) if words else "", size))
    if len(card.processes) > MOST_NAMED:
        named.append("%d more" % (len(card.processes) - MOST_NAMED))
    return ": %s" % "; ".join(named) if named else ""


def _all_from_nvml(library: Any) -> List[Card]:
    found: List[Card] = []
    for number, handle in enumerate(library.handles()):
        if isinstance(handle, Exception):
            found.append(Card(number, "", "", 0, 0, fault=str(handle)))
        else:
            found += _from_nvml(library, number, handle)
    return found


def _from_nvml(library: Any, number: int, handle: Any) -> List[Card]:
    card = _read(library, number, handle)
    if card.fault or not library.has_instances(handle):
        return [card]
    minor = library.minor(handle)
    instances = []
    for instance in library.instances(handle):
        gpu_id, compute_id = library.instance_ids(instance)
        access = "%s/capabilities/gpu%d/mig/gi%d/ci%d/access" % (DRIVER, minor, gpu_id, compute_id)
        cap = _stated(access, "DeviceFileMinor")
        node = None if cap is None else "/dev/nvidia-caps/nvidia-cap%s" % cap
        instances.append(_read(library, number, instance)._replace(node=node, is_instance=True))
    return [card._replace(has_instances=True), *instances]


def _read(library: Any, number: int, handle: Any) -> Card:
    from .nvml import NvmlError  # noqa: PLC0415

    try:
        total_mib, used_mib = library.memory_mib(handle)
        uuid = library.uuid(handle)
        name = library.name(handle)
    except NvmlError as error:
        return Card(number, "", "", 0, 0, fault=str(error))
    if not _UUID.fullmatch(uuid):
        return Card(number, "", short(name, 80), 0, 0, fault="it shows no UUID but %r" % short(uuid, 80))
    try:
        node: Optional[str] = "/dev/nvidia%d" % library.minor(handle)
    except NvmlError:
        node = None
    return Card(number, uuid, name, total_mib, used_mib, node, library.processes(handle))


def _from_nvidia_smi() -> List[Card]:
    lines = _nvidia_smi("--query-gpu=" + _FIELDS, "--format=csv,noheader,nounits")
    rows = [_card(line) for line in lines[:_MOST_LINES]]
    nodes, users = _nodes(), _compute_apps()
    found = [row._replace(node=nodes.get(row.uuid), processes=users.get(row.uuid, ())) for row in rows]
    if any(card.has_instances for card in found):
        found = _with_instances(found)
    return found


def _nvidia_smi(*arguments: str) -> List[str]:
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=QUERY_TIMEOUT_S,
            check=False,
        )
    except FileNotFoundError as error:
        raise DeviceError(
            "nvidia-smi is not there: no NVIDIA driver, or not on PATH; 'devices: none' needs no card"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise DeviceError("nvidia-smi does not answer within %d s" % QUERY_TIMEOUT_S) from error
    except OSError as error:
        raise DeviceError("nvidia-smi cannot be started: %s" % error.strerror) from error
    text = done.stdout.decode("utf-8", "replace")
    if done.returncode != 0:
        said = (text + done.stderr.decode("utf-8", "replace")).strip()
        raise DeviceError("nvidia-smi failed with exit code %d: %s" % (done.returncode, short(said)))
    return [line for line in text.splitlines() if line.strip()]


def _compute_apps() -> Dict[str, Tuple[Holder, ...]]:
    """Returns the processes by card; a list that cannot be had hides none: the memory in use shows them."""
    found: Dict[str, Tuple[Holder, ...]] = {}
    try:
        lines = _nvidia_smi("--query-compute-apps=gpu_uuid,pid,used_memory", "--format=csv,noheader,nounits")
    except DeviceError:
        return found
    for line in lines:
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 3 and fields[1].isdigit():
            used = int(fields[2]) if fields[2].isdigit() else None
            found[fields[0]] = (*found.get(fields[0], ()), (int(fields[1]), used))
    return found


def _nodes() -> Dict[str, str]:
    """Returns /dev/nvidiaN by UUID, as the driver tells under /proc."""
    found = {}
    for path in glob.glob(glob.escape(DRIVER) + "/gpus/*/information"):
        uuid, minor = _stated(path, "GPU UUID"), _stated(path, "Device Minor")
        if uuid and minor:
            found[uuid] = "/dev/nvidia" + minor
    return found


def _stated(path: str, key: str) -> Optional[str]:
    """Returns what a file of lines ``key: value`` says of a key."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            for line in file:
                name, colon, value = line.partition(":")
                if colon and name.strip() == key:
                    return value.strip()
    except OSError:
        pass
    return None


def _with_instances(found: Sequence[Card]) -> List[Card]:
    """Puts behind each card its MIG instances, of which ``nvidia-smi -L`` tells neither memory nor processes:
    whether one is free their leases alone say.
    """
    by_number: Dict[int, List[Card]] = {}
    number = -1
    for line in _nvidia_smi("-L"):
        card = re.match(r"GPU ([0-9]+):", line)
        instance = _INSTANCE.match(line)
        if card:
            number = int(card.group(1))
        elif instance:
            entry = Card(number, instance.group(2), instance.group(1), 0, 0, is_instance=True)
            by_number.setdefault(number, []).append(entry)
    return [each for card in found for each in (card, *by_number.get(card.number, ()))]


def _card(line: str) -> Card:
    """Returns a row's card; a line that is no row is a fault of a card that nobody can ask for."""
    fields = [field.strip() for field in line.split(",")]
    if len(fields) < 6 or not fields[0].isdecimal():
        return Card(NO_CARD, "", "", 0, 0, fault="nvidia-smi says: %s" % short(line, 200))
    index, uuid, total, used, mig = (int(fields[0]), fields[1], *fields[-3:])
    name = short(", ".join(fields[2:-3]), 80)
    if not _UUID.fullmatch(uuid):
        return Card(index, "", name, 0, 0, fault="it shows no UUID but %r" % short(uuid, 80))
    return Card(index, uuid, name, _mib(total), _mib(used), has_instances=mig == "Enabled")


def _mib(text: str) -> int:
    """MIG parents and some boards print [N/A]: counted as 0, never as an error."""
    return int(text) if text.isdigit() else 0
