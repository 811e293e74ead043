"""A folder of answers that grows batch by batch: a shard is there whole, or not at all.

Knows files alone. A shard is written beside its place, flushed to the disk and renamed. Its name has a hash
of its prompts: one that lacks some all the same (a copy that ended early) is removed, and they count as
unanswered. `.generation.json` keeps by what settings the answers came about, since answers of different ones
do not belong together.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SETTINGS = ".generation.json"
PREFIX = "answers-"
UNFINISHED = ".unfinished"


class ShardFolder:
    """The answers so far; `removed` names the broken shards that stood there.

    Raises:
        ValueError: the folder holds answers that came about by other settings.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob(f".*{UNFINISHED}"):
            leftover.unlink()
        self._agree(dict(settings))
        self.removed: list[str] = []

    def answered(self) -> set[str]:
        """Return the digests of the prompts that have their answer."""
        found: set[str] = set()
        for shard in sorted(self._folder.glob(f"{PREFIX}*.jsonl")):
            try:
                found |= _digests(shard)
            except (ValueError, KeyError, TypeError):
                shard.unlink()
                self.removed.append(shard.name)
        return found

    def write(self, number: int, answers: Sequence[Mapping[str, Any]]) -> None:
        """Add the shard of a batch; an answer's "prompt" is the digest of its prompt."""
        lines = [json.dumps(answer, separators=(",", ":")) + "\n" for answer in answers]
        whole = _hash([answer["prompt"] for answer in answers])
        self._replace(f"{PREFIX}{number:06d}-{whole}.jsonl", "".join(lines))

    def _agree(self, settings: dict[str, Any]) -> None:
        path = self._folder / SETTINGS
        if not path.exists():
            self._replace(SETTINGS, json.dumps(settings, indent=2) + "\n")
            return
        before = json.loads(path.read_text(encoding="utf-8"))
        other = [
            f"{name} was {before.get(name)!r} and is {value!r}"
            for name, value in settings.items()
            if before.get(name) != value
        ]
        if other:
            raise ValueError(
                f"{self._folder} holds answers made otherwise: {', '.join(other)}; "
                "take another folder, or go on as before"
            )

    def _replace(self, name: str, text: str) -> None:
        unfinished = self._folder / f".{name}{UNFINISHED}"
        with unfinished.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        unfinished.rename(self._folder / name)


def _digests(shard: Path) -> set[str]:
    with shard.open(encoding="utf-8") as lines:
        prompts = [json.loads(line)["prompt"] for line in lines]
    if shard.stem.rpartition("-")[2] != _hash(prompts):
        raise ValueError("lines are missing")
    return set(prompts)


def _hash(prompts: Sequence[str]) -> str:
    return hashlib.sha256("".join(prompts).encode()).hexdigest()[:8]
