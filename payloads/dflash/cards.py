"""Graphics cards as values: what torch reports of each, by a short name, or said as `96GiB:sm_120`.

A name stands for what the card reports, which is less than what it is sold with: a card of "96 GB" reports
94.97 GiB. A size that is said is taken as said. Loads without torch.

Sources: the H200 is this project's own measurement (docs/performance.md). The others are the capacities that
torch's out-of-memory messages name in public reports; drivers and ECC settings move them by up to 0.15 GiB.
"""

import difflib
import re
from dataclasses import dataclass

GIB = 2**30
MOST_GIB = 4096  # more than any card has
MAJORS = range(5, 16)  # architectures that torch has kernels for, and some to come
MOST_SHOWN = 60  # characters of what is refused
SOLD_SHARE = 0.04  # a card reports so much less than it is sold with, at most
_SAID = re.compile(r"(?P<size>\d+(?:\.\d+)?) ?GiB:sm_?(?P<capability>\d{2,3})", re.IGNORECASE)
_SIZE_ALONE = re.compile(r"(?P<size>\d+(?:\.\d+)?) ?(?:Gi?B?)?(?::.*)?", re.IGNORECASE)


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
        ValueError: it is neither, or says what no card is.
    """
    key = "-".join(text.lower().split())
    if key in CARDS:
        return CARDS[key]
    said = _SAID.fullmatch(text.strip())
    if said is None:
        raise ValueError(_what_to_say(text))
    digits, size = said["capability"], float(said["size"])
    capability = (int(digits[:-1]), int(digits[-1]))
    if size > MOST_GIB:
        raise ValueError(f"card {_cut(text)!r} has more than {MOST_GIB} GiB; say its size, as 96GiB:sm_120")
    if int(size * GIB) <= 0:
        raise ValueError(f"card {_cut(text)!r} has no memory; say its size, as 96GiB:sm_120")
    if capability[0] not in MAJORS:
        raise ValueError(
            f"card {text!r}: sm_{digits} is no architecture between sm_{MAJORS[0]}0 and sm_{MAJORS[-1]}9; "
            "an H200 has sm_90, an RTX PRO 6000 sm_120"
        )
    return Card(
        name=f"a card of {size:g} GiB",
        key=f"{size:g}GiB:sm_{digits}",
        capability=capability,
        total_bytes=int(size * GIB),
    )


def _what_to_say(text: str) -> str:
    sized, meant = _SIZE_ALONE.fullmatch(text.strip()), _meant(text)
    if sized is None or (meant and text.strip().isdigit()):  # 4090 is no size
        hint = f"did you mean {' or '.join(map(repr, meant))}?" if meant else f"known: {', '.join(CARDS)}"
        return f"unknown card {_cut(text)!r}; {hint}; or say size and architecture, as 96GiB:sm_120"
    size = float(sized["size"])
    sold = [card for card in CARDS.values() if 1 - SOLD_SHARE <= card.total_bytes / GIB / max(size, 1) <= 1]
    known = ", ".join(f"{card.key} has {card.total_bytes / GIB:.2f} GiB" for card in sold)
    hint = f"; what is sold with that much reports less: {known}" if known else ""
    return f"card {_cut(text)!r} names no size in GiB with an architecture, as 96GiB:sm_120{hint}"


def _meant(text: str) -> list[str]:
    """Return the cards that have all of its words, in whatever order, or the one that is spelt most alike."""
    words = set(re.split(r"[\s_-]+", text[:MOST_SHOWN].strip().lower()))
    named = [key for key, card in CARDS.items() if words <= {*key.split("-"), *card.name.lower().split()}]
    return named or difflib.get_close_matches(text[:MOST_SHOWN].lower(), CARDS, n=1)


def _cut(text: str) -> str:
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}…"


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
