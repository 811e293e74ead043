"""A made-up allocator of CUDA memory, whose snapshots have the form of torch's.

It hands out addresses, or takes those of tensors, rounds as torch does, and keeps the history. Standard
library only, for the supervisor's tests on a bare Python 3.8.
"""

from typing import Any, Dict, List, Optional, Sequence, Tuple

MIB = 2**20
RUNPY = ("<frozen runpy>", 198, "_run_module_as_main")
MAIN = ("/root/.orch/runs/r/code/train.py", 90, "<module>")
STEP = ("/root/.orch/runs/r/code/train.py", 40, "step")
CALL = ("/venv/lib/python3.11/site-packages/torch/nn/modules/module.py", 1700, "_call_impl")
MOVE = ("/venv/lib/python3.11/site-packages/torch/nn/modules/module.py", 1300, "convert")
APPLY = ("/venv/lib/python3.11/site-packages/torch/autograd/function.py", 300, "apply")
BACKWARD_CALL = ("/venv/lib/python3.11/site-packages/torch/autograd/__init__.py", 350, "backward")
OPTIMIZER = ("/venv/lib/python3.11/site-packages/torch/optim/adamw.py", 100, "_init_group")
OPTIMIZER_STEP = ("/venv/lib/python3.11/site-packages/torch/optim/adamw.py", 400, "_multi_tensor_adamw")
OUTER = (STEP, MAIN, RUNPY)

Frame = Tuple[str, int, str]


def frames(*named: Frame) -> List[Dict[str, Any]]:
    """Returns frames as torch spells them, innermost first."""
    return [{"filename": file, "line": line, "name": name} for file, line, name in named]


def in_module(*inner: Frame) -> Tuple[Frame, ...]:
    """Returns the frames of a call of a module, ``inner`` first."""
    return (*inner, CALL, *OUTER)


class Allocator:
    """One card's memory; ``most_events`` is how long its history is at most."""

    def __init__(self, most_events: int = 200_000) -> None:
        self.events: List[Dict[str, Any]] = []
        self._most_events = most_events
        self._live: Dict[int, Dict[str, Any]] = {}
        self._next = 0x7F00_0000_0000

    def alloc(self, size: int, *named: Frame, at: Optional[int] = None) -> int:
        """Returns the address of ``size`` bytes."""
        address = self._next if at is None else at
        self._next += 1024 * MIB
        where = frames(*named)
        self._note("alloc", addr=address, size=size, frames=where)
        self._live[address] = {
            "address": address,
            "size": max(512, -(-size // 512) * 512),
            "requested_size": size,
            "state": "active_allocated",
            "frames": where,
        }
        return address

    def free(self, address: int, *named: Frame) -> None:
        size = self._live.pop(address)["requested_size"]
        for action in ("free_requested", "free_completed"):
            self._note(action, addr=address, size=size, frames=frames(*named))

    def fail(self, size: int, free: int, *named: Frame) -> None:
        self._note("oom", device_free=free, size=size, frames=frames(*named))

    @property
    def allocated(self) -> int:
        return sum(block["size"] for block in self._live.values())

    def snapshot(self, device: int = 0, inactive: Sequence[int] = ()) -> Dict[str, Any]:
        """Returns what torch would; the blocks in ``inactive`` are cached for others."""
        blocks = list(self._live.values())
        for number, size in enumerate(inactive):
            address = 0x7E00_0000_0000 + number * 1024 * MIB
            blocks.append({"address": address, "size": size, "state": "inactive", "frames": []})
        segments = [
            {
                "device": device,
                "address": block["address"],
                "total_size": block["size"],
                "stream": 0,
                "segment_type": "large",
                "blocks": [block],
            }
            for block in blocks
        ]
        traces: List[List[Dict[str, Any]]] = [[] for _ in range(device)]
        return {"segments": segments, "device_traces": [*traces, list(self.events)]}

    def _note(self, action: str, **fields: Any) -> None:
        self.events.append(dict(fields, action=action, stream=0))
        del self.events[: -self._most_events]


def without_addresses(snapshot: Dict[str, Any]) -> Dict[str, Any]:
    """Returns the form of torch 2.0: blocks without addresses, and their birth in a history of their own."""
    for segment in snapshot["segments"]:
        for block in segment["blocks"]:
            requested = block.pop("requested_size", None)
            where = block.pop("frames")
            block.pop("address")
            if requested is not None:
                block["history"] = [{"addr": 0, "real_size": requested, "frames": where}]
    return snapshot
