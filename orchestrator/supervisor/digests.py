"""What a host has of a run, told in hashes: its records block by block, and how its code differs from a
manifest.

A comparison then costs one round trip and 64 bytes for each mebibyte of log. Only reads; what the hashes are
compared with is the controller's affair. Frames stay short however long a log, or a list of names, is.
"""

import hashlib
import os
from typing import Any, Dict, Iterator, List, Optional, Sequence

from .cuts import segment_name, stub_for, stub_indexes
from .rundir import RunDir
from .store import Entry, Store, changed_files

BLOCK_BYTES = 1024 * 1024
MOST_BLOCKS = 64  # in one frame
MOST_NAMED = 20


def of_records(run: RunDir, sizes: Sequence[int]) -> Iterator[Dict[str, Any]]:
    """Yields frames of ``segment``, its ``bytes`` here, and the SHA-256 of each block from ``first`` on.

    ``sizes`` says how many bytes of each segment are to be hashed, so that the last block ends where the
    asker's does; of a segment beyond them only the size is told.
    """
    for index in sorted(_indexes(run.records)):
        try:
            fd = os.open(os.path.join(run.records, segment_name(index)), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # the run's limit has just removed it
        with os.fdopen(fd, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            left = min(size, sizes[index]) if index < len(sizes) else 0
            first = 0
            while True:
                blocks = block_hashes(file, min(left, MOST_BLOCKS * BLOCK_BYTES))
                yield {"segment": index, "bytes": size, "first": first, "blocks": blocks}
                first += len(blocks)
                left -= MOST_BLOCKS * BLOCK_BYTES
                if left <= 0:
                    break


def of_cut(run: RunDir) -> Optional[Dict[str, Any]]:
    """Returns the newest stub, ``segment`` and its ``line``; None while no limit has removed anything."""
    stubs = stub_indexes(run.records)
    found = stub_for(run.records, stubs[-1]) if stubs else None
    return None if found is None else {"segment": found[0], "line": found[1].decode("utf-8", "replace")}


def of_bundle(run: RunDir, store: Store, entries: Sequence[Entry]) -> Dict[str, Any]:
    """Returns how the run's copy of the code and the store's objects differ from a manifest.

    Of the paths and hashes the first `MOST_NAMED` are named, all are counted.
    """
    changed = changed_files(run.code, entries)
    absent, damaged = store.look(entries)
    return {
        "changed": changed[:MOST_NAMED],
        "changed_count": len(changed),
        "damaged": damaged[:MOST_NAMED],
        "damaged_count": len(damaged),
        "absent_count": len(absent),
    }


def block_hashes(file: Any, size: int) -> List[str]:
    """Returns the SHA-256 of each block of the next ``size`` bytes of a binary file; fewer at its end."""
    hashes = []
    while size > 0:
        data = file.read(min(size, BLOCK_BYTES))
        if not data:
            break
        hashes.append(hashlib.sha256(data).hexdigest())
        size -= len(data)
    return hashes


def _indexes(folder: str) -> List[int]:
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    return [int(name[:6]) for name in names if name[:6].isdigit() and name == segment_name(int(name[:6]))]
