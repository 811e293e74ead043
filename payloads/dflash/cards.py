"""Graphics cards as values: what torch reports of each, by a short name, or said as `96GiB:sm_120`.

A name stands for what the card reports, which is less than what it is sold with: a card of "96 GB" reports
94.97 GiB. A size that is said is taken as said. Loads without torch.

Sources: the H200 is this project's own measurement (docs/performance.md). The others are the capacities that
torch's out-of-memory messages name in public reports; drivers and ECC settings move them by up to 0.15 GiB.
"""

import re
from dataclasses import dataclass

from dflash.values import unknown

GIB = 2**30
_SAID = re.compile(r"(?P<size>\d+(?:\.\d+)?) ?GiB:sm_?(?P<capability>\d{2,3})", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """One card: all its memory, and the architecture that decides which kernels there are."""

    name: str
    key: str
    capability: tuple[int, int]
    total_bytes: int

    def describe(self) -> str:
        """Return the card in words."""
        major, minor = self.capability
        return f"{self.name}, {self.total_bytes / GIB:.2f} GiB, sm_{major}{minor}"


def parse_card(text: str) -> Card:
    """Return the card of that key, or the one that `SIZEGiB:sm_XY` says.

    Raises:
        ValueError: it is neither.
    """
    key = text.strip().lower()
    if key in CARDS:
        return CARDS[key]
    said = _SAID.fullmatch(text.strip())
    if said is None:
        raise ValueError(f"{unknown('card', text, CARDS)}; or say size and architecture, as 96GiB:sm_120")
    digits, size = said["capability"], float(said["size"])
    capability = (int(digits[:-1]), int(digits[-1]))
    if size <= 0:
        raise ValueError(f"card {text!r} has no memory; say its size, as 96GiB:sm_120")
    return Card(
        name=f"a card of {size:g} GiB",
        key=f"{size:g}GiB:sm_{digits}",
        capability=capability,
        total_bytes=int(size * GIB),
    )


def _known(key: str, name: str, gib: float, capability: tuple[int, int]) -> Card:
    return Card(name=name, key=key, capability=capability, total_bytes=int(gib * GIB))


CARDS = {
    card.key: card
    for card in (
        _known("a100-40gb", "NVIDIA A100-SXM4-40GB", 39.49, (8, 0)),
        _known("a100-80gb", "NVIDIA A100-SXM4-80GB", 79.25, (8, 0)),
        _known("b200", "NVIDIA B200", 178.35, (10, 0)),
        _known("h100", "NVIDIA H100 80GB HBM3", 79.10, (9, 0)),
        _known("h200", "NVIDIA H200", 139.80, (9, 0)),
        _known("l40s", "NVIDIA L40S", 44.39, (8, 9)),
        _known("rtx-4090", "NVIDIA GeForce RTX 4090", 23.64, (8, 9)),
        _known("rtx-5090", "NVIDIA GeForce RTX 5090", 31.36, (12, 0)),
        _known("rtx-6000-ada", "NVIDIA RTX 6000 Ada Generation", 47.40, (8, 9)),
        _known("rtx-pro-6000", "NVIDIA RTX PRO 6000 Blackwell Server Edition", 94.97, (12, 0)),
    )
}
