"""Settings of torch's CUDA caching allocator, as its model in `dflash.memory.allocator` needs them.

Knows how `PYTORCH_CUDA_ALLOC_CONF` is spelled (`AcceleratorAllocatorConfig::parseArgs` and
`CUDAAllocatorConfig::parseArgs` in torch) and which settings change what is reserved. Loads without torch.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dflash.values import unknown

MIB = 2**20
LARGE_SEGMENT_MB = 20
LEAST_LARGE_SEGMENT_MB = 11
INTERVALS = 16  # of sizes, each a power of two of MiB, from 1 MiB on; the last one holds all that is larger


@dataclass(frozen=True, kw_only=True, slots=True)
class AllocatorSettings:
    """What decides how much is reserved; sizes in bytes.

    `max_split_bytes` None: every block may be split. `roundup_power2_divisions` has one number for each
    interval of sizes: into how many steps it is divided from one power of two to the next; 0 or 1 is none.
    `garbage_collection_threshold` works only where the process's share of the card is limited, as in torch.
    `per_process_memory_fraction` is a share of the card's memory; None sets no limit.
    """

    expandable_segments: bool = False
    large_segment_bytes: int = LARGE_SEGMENT_MB * MIB
    max_split_bytes: int | None = None
    max_non_split_rounding_bytes: int = LARGE_SEGMENT_MB * MIB
    roundup_power2_divisions: tuple[int, ...] = (0,) * INTERVALS
    garbage_collection_threshold: float = 0.0
    per_process_memory_fraction: float | None = None


def parse_alloc_conf(text: str) -> AllocatorSettings:
    """Return the settings that `PYTORCH_CUDA_ALLOC_CONF` would make, as torch 2.11 reads it.

    Settings that change no amount of device memory (those of pinned memory, of locks) are taken and do
    nothing here.

    Raises:
        ValueError: a key or value that torch would refuse, settings that break each other, or an allocator
            that is not torch's own.
    """
    values: dict[str, Any] = {}
    for key, value in _pairs(text):
        if key in values:
            raise ValueError(f"allocator setting {key} is given twice")
        if key not in _PARSERS:
            raise ValueError(unknown("allocator setting", key, _PARSERS))
        try:
            values[key] = _PARSERS[key](value)
        except ValueError as error:
            raise ValueError(f"allocator setting {key} is {value!r}; it must be {error}") from None
    _refuse_traps(values)
    segment_bytes = values.get("large_segment_size_mb", LARGE_SEGMENT_MB) * MIB
    max_split_mb = values.get("max_split_size_mb")
    return AllocatorSettings(
        expandable_segments=values.get("expandable_segments", False),
        large_segment_bytes=segment_bytes,
        max_split_bytes=None if max_split_mb is None else max_split_mb * MIB,
        # Without a setting of its own it is as large as a segment (parseArgs).
        max_non_split_rounding_bytes=values.get("max_non_split_rounding_mb", segment_bytes // MIB) * MIB,
        roundup_power2_divisions=values.get("roundup_power2_divisions", (0,) * INTERVALS),
        garbage_collection_threshold=values.get("garbage_collection_threshold", 0.0),
        per_process_memory_fraction=values.get("per_process_memory_fraction"),
    )


def with_expandable_segments(text: str) -> str:
    """Return the spelling with segments that grow, and without what such segments do not go with."""
    kept = [(key, value) for key, value in _pairs(text) if key not in {"expandable_segments", *_TRAPS}]
    return ",".join(f"{key}:{value}" for key, value in [*kept, ("expandable_segments", "True")])


def _pairs(text: str) -> list[tuple[str, str]]:
    """Split at commas outside of brackets; torch drops white space, and so does this."""
    compact = "".join(text.split())
    pairs = []
    for part in re.split(r",(?![^\[]*\])", compact) if compact else []:
        key, colon, value = part.partition(":")
        if not colon or not value:
            raise ValueError(f"allocator setting {part!r} is not key:value")
        pairs.append((key, value))
    return pairs


_TRAPS = ("max_split_size_mb", "garbage_collection_threshold")


def _refuse_traps(values: dict[str, Any]) -> None:
    if values.get("backend", "native") != "native":
        raise ValueError("allocator setting backend:cudaMallocAsync cannot be estimated; only native can")
    if values.get("expandable_segments"):
        for key in _TRAPS:
            if key in values:
                raise ValueError(f"allocator setting {key} breaks with expandable_segments:True; keep one")
    segment_mb = values.get("large_segment_size_mb", LARGE_SEGMENT_MB)
    for key in ("max_split_size_mb", "max_non_split_rounding_mb"):
        if values.get(key, segment_mb) < segment_mb:
            raise ValueError(f"allocator setting {key} is {values[key]}, below the {segment_mb} of a segment")


def _boolean(value: str) -> bool:
    if value not in ("True", "False"):
        raise ValueError("True or False")
    return value == "True"


def _megabytes(least: int) -> Callable[[str], int]:
    def parse(value: str) -> int:
        if not re.fullmatch(r"[0-9]{1,10}", value) or int(value) < least:
            raise ValueError(f"a whole number of at least {least}")
        return int(value)

    return parse


def _share(value: str) -> float:
    return _number_between(value, is_one_allowed=True)


def _threshold(value: str) -> float:
    return _number_between(value, is_one_allowed=False)


def _number_between(value: str, *, is_one_allowed: bool) -> float:
    what = "above 0 and at most 1" if is_one_allowed else "between 0 and 1"
    if not re.fullmatch(r"[0-9]*\.?[0-9]+(?:[eE][-+]?[0-9]{1,3})?", value):
        raise ValueError(what)
    number = float(value)
    if not (0 < number < 1 or (is_one_allowed and number == 1)):
        raise ValueError(what)
    return number


def _divisions(value: str) -> tuple[int, ...]:
    """Return the divisions by interval: one number for all, or `[64:8,256:4,>:1]` (sizes in MB).

    A size between two that are named has none (`parseRoundUpPower2Divisions`).
    """
    if not value.startswith("["):
        return (_power_of_two(value),) * INTERVALS
    if not re.fullmatch(r"\[[0-9]+:[0-9]+(,[0-9]+:[0-9]+)*(,>:[0-9]+)?\]", value):
        raise ValueError(_DIVISIONS)
    divisions, last = [0] * INTERVALS, -1
    for entry in value[1:-1].split(","):
        boundary, _, text = entry.partition(":")
        count = int(text) and _power_of_two(text)
        if boundary == ">":
            divisions[last + 1 :] = [count] * (INTERVALS - last - 1)
            continue
        index = min(_power_of_two(boundary).bit_length() - 1, INTERVALS - 1)
        if index <= last:
            raise ValueError(_DIVISIONS)
        if last < 0:
            divisions[:index] = [count] * index
        divisions[index] = count
        last = index
    return tuple(divisions)


_DIVISIONS = "powers of two: 4, or ascending by size in MB such as [256:1,512:2,>:8]"


def _power_of_two(value: str) -> int:
    number = int(value) if re.fullmatch(r"[0-9]{1,10}", value) else 0
    if number < 1 or number & (number - 1):
        raise ValueError(_DIVISIONS)
    return number


def _backend(value: str) -> str:
    if value not in ("native", "cudaMallocAsync"):
        raise ValueError("native or cudaMallocAsync")
    return value


_PARSERS: dict[str, Callable[[str], Any]] = {
    "backend": _backend,
    "expandable_segments": _boolean,
    "garbage_collection_threshold": _threshold,
    "large_segment_size_mb": _megabytes(LEAST_LARGE_SEGMENT_MB),
    "max_non_split_rounding_mb": _megabytes(LARGE_SEGMENT_MB),
    "max_split_size_mb": _megabytes(LARGE_SEGMENT_MB),
    "per_process_memory_fraction": _share,
    "roundup_power2_divisions": _divisions,
} | dict.fromkeys(
    (
        "graph_capture_record_stream_reuse",
        "pinned_free_catch_all",
        "pinned_max_cached_size_mb",
        "pinned_max_round_threshold_mb",
        "pinned_num_register_threads",
        "pinned_reserve_segment_size_mb",
        "pinned_use_background_threads",
        "pinned_use_cuda_host_register",
        "release_lock_on_cudamalloc",
        "throw_on_cudamalloc_oom",
    ),
    str,
)
