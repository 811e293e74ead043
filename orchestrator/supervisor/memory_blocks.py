"""Blocks of torch's CUDA allocator: which are live, and which were when most was allocated (pure).

Reads the plain containers that ``torch.cuda.memory._snapshot()`` returns, of torch 2.0 to 2.14. Sizes are in
bytes. What a block is, `memory_names` tells.
"""

from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence

_WHOLE_BYTES = 512  # the allocator's smallest unit


class Block(NamedTuple):
    """Memory that somebody holds; ``requested`` is what was asked for, ``frames`` where, innermost first.

    ``born`` is the number of its event in the history, None for one from before it; ``frames`` None says that
    its birth was not seen, and an empty list that no Python ran in that thread.
    """

    address: int
    size: int
    requested: int
    frames: Optional[Sequence[Mapping[str, Any]]]
    born: Optional[int]


class Peak(NamedTuple):
    """The most that was allocated at one moment of the history, and what that was."""

    allocated_bytes: int
    blocks: List[Block]


def live(snapshot: Mapping[str, Any], device: int) -> List[Block]:
    """Returns the blocks that are allocated on a card."""
    births = _births(history(snapshot, device))
    found = []
    for segment in _segments(snapshot, device):
        address = segment["address"]
        for block in segment["blocks"]:
            address = block.get("address", address)
            if block["state"] == "active_allocated":
                older = (block.get("history") or [{}])[0]  # torch before 2.1
                frames = block.get("frames", older.get("frames"))
                born = births.get(address)
                is_seen = bool(frames) or born is not None
                requested = block.get("requested_size", older.get("real_size", block["size"]))
                found.append(Block(address, block["size"], requested, frames if is_seen else None, born))
            address += block["size"]
    return found


def history(snapshot: Mapping[str, Any], device: int) -> Sequence[Mapping[str, Any]]:
    """Returns a card's events, the oldest first."""
    traces: Sequence[Sequence[Mapping[str, Any]]] = snapshot.get("device_traces", ())
    return traces[device] if device < len(traces) else ()


def reserved(snapshot: Mapping[str, Any], device: int) -> int:
    """Returns how much the allocator holds on a card."""
    return sum(segment["total_size"] for segment in _segments(snapshot, device))


def largest_free(snapshot: Mapping[str, Any], device: int) -> int:
    """Returns the largest block that the allocator could still hand out without asking the card for more."""
    return max(
        (
            block["size"]
            for segment in _segments(snapshot, device)
            for block in segment["blocks"]
            if block["state"] == "inactive"
        ),
        default=0,
    )


def last_refused(snapshot: Mapping[str, Any], device: int) -> Optional[Mapping[str, Any]]:
    """Returns the event of the last allocation that failed."""
    refused = (event for event in reversed(history(snapshot, device)) if event["action"] == "oom")
    return next(refused, None)


def peak(snapshot: Mapping[str, Any], device: int) -> Peak:
    """Goes back through the history from what is live now to the moment when the most was.

    Sizes of events are what was asked for; rounded up to 512 bytes they miss what the allocator did not split
    off, up to 1 MiB of a large block.
    """
    trace = history(snapshot, device)
    blocks = {block.address: block for block in live(snapshot, device)}
    freed = _freed(trace)
    allocated = most = sum(_rounded(block.requested) for block in blocks.values())
    at = len(trace)
    for index in range(len(trace) - 1, -1, -1):
        event = trace[index]
        action = event["action"]
        if action == "alloc":
            allocated -= _rounded(event["size"])
        elif action == freed:
            allocated += _rounded(event["size"])
            if allocated > most:
                most, at = allocated, index
    return Peak(most, list(_before(trace, at, freed, blocks).values()))


def _segments(snapshot: Mapping[str, Any], device: int) -> List[Mapping[str, Any]]:
    return [segment for segment in snapshot["segments"] if segment.get("device", 0) == device]


def _births(trace: Sequence[Mapping[str, Any]]) -> Dict[int, int]:
    return {event["addr"]: index for index, event in enumerate(trace) if event["action"] == "alloc"}


def _freed(trace: Sequence[Mapping[str, Any]]) -> str:
    """Returns the action that ends an allocation; a history may be asked to skip the one that comes first."""
    is_asked = any(event["action"] == "free_requested" for event in trace)
    return "free_requested" if is_asked else "free_completed"


def _before(
    trace: Sequence[Mapping[str, Any]], at: int, freed: str, blocks: Dict[int, Block]
) -> Dict[int, Block]:
    """Returns the blocks that were live just before the event ``at``, given those that are now."""
    for index in range(len(trace) - 1, at - 1, -1):
        event = trace[index]
        if event["action"] == "alloc":
            blocks.pop(event["addr"], None)
        elif event["action"] == freed:
            size = event["size"]
            blocks[event["addr"]] = Block(event["addr"], _rounded(size), size, None, None)
    wanted = {address for address, block in blocks.items() if block.frames is None}
    for index in range(at - 1, -1, -1):
        if not wanted:
            break
        event = trace[index]
        if event["action"] == "alloc" and event["addr"] in wanted:
            address = event["addr"]
            wanted.discard(address)
            blocks[address] = blocks[address]._replace(frames=event.get("frames", ()), born=index)
    return blocks


def _rounded(size: int) -> int:
    return max(_WHOLE_BYTES, -(-size // _WHOLE_BYTES) * _WHOLE_BYTES)
