"""Settings of torch's CUDA allocator as checked values, and their one spelling (stdlib only).

They are checked because torch is of little help: an unknown key fails at the first allocation of a run that
may have loaded for minutes, and a key without a value kills the process that imports torch. The tables at the
end say what torch takes, by the release that brought it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from functools import partial

from orchestrator.errors import UsageError
from orchestrator.text import did_you_mean, quoted

__all__ = ["HARMLESS", "AllocValue", "parse_alloc_conf", "parse_setting", "render_alloc_conf"]

AllocValue = bool | int | float | str | dict[str, int]
"""A mapping is ``roundup_power2_divisions`` by interval: ``{"256": 1, "512": 2, ">": 8}``, sizes in MB."""

_MAX_INT = 2**31 - 1  # torch parses several of its numbers with stoi


def parse_alloc_conf(conf: str | Mapping[str, object]) -> dict[str, AllocValue]:
    """Returns checked allocator settings from ``"key:value,…"`` or from a mapping.

    Raises:
        UsageError: an unknown or repeated key, a value outside of what torch takes, or a combination in
            which one setting makes another fail or do nothing.
    """
    settings: dict[str, AllocValue] = {}
    for key, value in (_split_conf(conf) if isinstance(conf, str) else conf).items():
        try:
            settings[key] = parse_setting(key, value)
        except UsageError as error:
            raise UsageError(f"{quoted(key)} {error}") from None
    _refuse_traps(settings)
    return settings


def parse_setting(key: str, value: object) -> AllocValue:
    """Returns one setting's checked value; a message reads on after the key, which the caller puts before it.

    Raises:
        UsageError: torch knows no such key, or takes no such value.
    """
    parse = _PARSERS.get(key)
    if parse is None:
        raise UsageError(f"is no allocator setting{did_you_mean(key, _PARSERS)}")
    try:
        return parse(value)
    except ValueError as error:
        raise UsageError(f"{error}, not {quoted(value)}") from None


def render_alloc_conf(settings: Mapping[str, AllocValue]) -> str:
    """Returns the one spelling of ``settings``, sorted by key, as PYTORCH_CUDA_ALLOC_CONF takes it."""
    return ",".join(f"{key}:{_rendered(settings[key])}" for key in sorted(settings))


def _split_conf(text: str) -> dict[str, object]:
    """Splits at commas outside of brackets; torch drops every space, so do we."""
    pairs: dict[str, object] = {}
    compact = text.replace(" ", "")
    for part in re.split(r",(?![^\[]*\])", compact) if compact else []:
        key, colon, value = part.partition(":")
        if not colon or not value:
            raise UsageError(f"{quoted(part)} is not key:value, which kills a process that imports torch")
        if key in pairs:
            raise UsageError(f"{quoted(key)} is given twice")
        pairs[key] = value
    return pairs


def _rendered(value: AllocValue) -> str:
    if isinstance(value, dict):
        return "[" + ",".join(f"{interval}:{divisions}" for interval, divisions in value.items()) + "]"
    return str(value)


def _refuse_traps(settings: Mapping[str, AllocValue]) -> None:
    if settings.get("expandable_segments") is True:
        for key in ("max_split_size_mb", "garbage_collection_threshold"):
            if key in settings:
                raise UsageError(
                    f"{key} works against expandable_segments:True, whose segments are never "
                    "split or collected that way: keep one of the two"
                )
    if settings.get("backend") == "cudaMallocAsync":
        for key in _NATIVE_ONLY:
            if settings.get(key):
                raise UsageError(f"backend:cudaMallocAsync ignores {key}: keep one of the two")
    segment_mb = settings.get("large_segment_size_mb", 20)
    for key in ("max_split_size_mb", "max_non_split_rounding_mb"):
        size_mb = settings.get(key, segment_mb)
        assert isinstance(size_mb, int)
        assert isinstance(segment_mb, int)
        if size_mb < segment_mb:
            raise UsageError(f"{key} ({size_mb}) is below large_segment_size_mb ({segment_mb})")


def _boolean(value: object) -> bool:
    if isinstance(value, bool):
        return value
    if value in ("True", "False"):
        return value == "True"
    raise ValueError("must be True or False, spelled so")


def _choice(*words: str) -> Callable[[object], str]:
    def parse(value: object) -> str:
        if isinstance(value, str) and value in words:
            return value
        raise ValueError(f"must be {' or '.join(words)}")

    return parse


def _integer(value: object, *, least: int, most: int = _MAX_INT) -> int:
    number = int(value) if isinstance(value, str) and re.fullmatch(r"[0-9]{1,10}", value) else value
    if isinstance(number, bool) or not isinstance(number, int) or not least <= number <= most:
        limit = f"of at least {least}" if most == _MAX_INT else f"from {least} to {most}"
        raise ValueError(f"must be a whole number {limit}")
    return number


def _power_of_two(value: object, *, least: int = 1, most: int = _MAX_INT) -> int:
    number = _integer(value, least=least, most=most)
    if number & (number - 1):
        raise ValueError("must be a power of two")
    return number


def _fraction(value: object, *, is_one_allowed: bool) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(value, str) and re.fullmatch(r"[0-9]*\.?[0-9]+(?:[eE][-+]?[0-9]{1,3})?", value):
        is_number = True
    number = float(value) if is_number else math.nan  # type: ignore[arg-type]  # checked on the lines above
    if not (1e-9 <= number < 1 or (is_one_allowed and number == 1)):
        raise ValueError("must be above 0 and at most 1" if is_one_allowed else "must be between 0 and 1")
    return number


def _roundup(value: object) -> int | dict[str, int]:
    """Takes one number for all sizes, or divisions by interval in MB, ascending, ``>`` (the rest) last."""
    if isinstance(value, str) and value.startswith("["):
        value = _roundup_list(value)
    if not isinstance(value, Mapping):
        return _power_of_two(value)
    intervals = list(value)
    sizes = [_power_of_two(interval, most=32768) for interval in intervals if interval != ">"]
    if not intervals or sizes != sorted(set(sizes)) or ">" in intervals[:-1]:
        raise ValueError("must list ascending intervals in MB, '>' last")
    return {str(interval): _power_of_two(value[interval], least=0) for interval in intervals}


def _roundup_list(text: str) -> dict[str, str]:
    if not re.fullmatch(r"\[(?:[0-9]+|>):[0-9]+(?:,(?:[0-9]+|>):[0-9]+)*\]", text):
        raise ValueError("must be a number or a list such as [256:1,512:2,>:8]")
    pairs: list[list[str]] = [part.split(":") for part in text[1:-1].split(",")]
    if len({interval for interval, _ in pairs}) < len(pairs):
        raise ValueError("must list each interval once")
    return dict(pairs)


_NATIVE_ONLY = (
    "expandable_segments",
    "garbage_collection_threshold",
    "graph_capture_record_stream_reuse",
    "large_segment_size_mb",
    "max_non_split_rounding_mb",
    "max_split_size_mb",
    "release_lock_on_cudamalloc",
    "roundup_power2_divisions",
)

_PARSERS: Mapping[str, Callable[[object], AllocValue]] = {
    # torch 2.4 and older
    "backend": _choice("native", "cudaMallocAsync"),
    "max_split_size_mb": partial(_integer, least=20),
    "roundup_power2_divisions": _roundup,
    "garbage_collection_threshold": partial(_fraction, is_one_allowed=False),
    "expandable_segments": _boolean,
    "release_lock_on_cudamalloc": _boolean,
    "pinned_use_cuda_host_register": _boolean,
    "pinned_num_register_threads": partial(_power_of_two, most=128),
    # 2.6
    "max_non_split_rounding_mb": partial(_integer, least=20),
    "pinned_use_background_threads": _boolean,
    # 2.9
    "graph_capture_record_stream_reuse": _boolean,
    # 2.10
    "per_process_memory_fraction": partial(_fraction, is_one_allowed=True),
    "pinned_reserve_segment_size_mb": partial(_integer, least=1),
    # 2.11
    "large_segment_size_mb": partial(_integer, least=11),
    # 2.12
    "throw_on_cudamalloc_oom": _boolean,
    "pinned_free_catch_all": _boolean,
    # 2.13
    "pinned_max_round_threshold_mb": partial(_integer, least=0),
    "pinned_max_cached_size_mb": partial(_integer, least=0),
}

HARMLESS: Mapping[str, str] = {
    "backend": "native",
    "max_split_size_mb": "128",
    "roundup_power2_divisions": "1",
    "garbage_collection_threshold": "0.8",
    "expandable_segments": "False",
    "release_lock_on_cudamalloc": "False",
    "pinned_use_cuda_host_register": "False",
    "pinned_num_register_threads": "1",
    "max_non_split_rounding_mb": "20",
    "pinned_use_background_threads": "False",
    "graph_capture_record_stream_reuse": "False",
    "per_process_memory_fraction": "1.0",
    "pinned_reserve_segment_size_mb": "1",
    "large_segment_size_mb": "20",
    "throw_on_cudamalloc_oom": "False",
    "pinned_free_catch_all": "False",
    "pinned_max_round_threshold_mb": "0",
    "pinned_max_cached_size_mb": "0",
}
"""A value for each key that torch takes at any time: whether it knows the key is told by trying."""
