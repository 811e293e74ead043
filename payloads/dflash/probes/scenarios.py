"""The out-of-memory probe's work: a device, a random drafter, and three scenarios, measured in turn.

Knows how time and peak memory are taken. Parameters, with their checks, are `dflash.probes.oom`'s.
"""

import json
import resource
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from dflash.drafter import DFlashDrafter
from dflash.events import emit_metric, emit_phase

if TYPE_CHECKING:  # that module is __main__ while this one runs
    from dflash.probes.oom import OomProbeParams

GIB = 2**30
KIB_PER_GIB = 2**20
REPORTED_METRICS = ("accuracy", "teacher_accuracy", "avg_streak", "teacher_avg_streak")


class NoSuchDevice(Exception):
    """The device that was asked for is not there."""


class LimitTooLarge(Exception):
    """The memory limit cannot be simulated on this card."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """A row's documents, and how many steps are taken on it."""

    name: str
    lengths: tuple[int, ...]
    iterations: int


def run(params: "OomProbeParams") -> None:
    """Run all scenarios, printing each as it ends.

    Raises:
        NoSuchDevice: before anything is allocated.
        LimitTooLarge: the simulated card is larger than the real one, or smaller than what is already used.
        torch.OutOfMemoryError: after saying which step it was and what had finished.
    """
    device = _open_device(params.device)
    print(f"DFlash out-of-memory probe · torch {torch.__version__} · {_describe(device)}")
    print(f"parameters: {json.dumps(asdict(params))}")
    if params.memory_limit_gib is not None:
        print(_limit_memory(params.memory_limit_gib, device))
    torch.set_default_dtype(getattr(torch, params.dtype))
    torch.manual_seed(params.seed)
    drafter = _build_drafter(params, device)

    finished: list[str] = []
    for scenario in (
        Scenario(name="warmup", lengths=(params.seq_len,), iterations=1),
        Scenario(name="timed", lengths=(params.seq_len,), iterations=params.iterations),
        Scenario(name="packed", lengths=params.packed_lengths, iterations=1),
    ):
        emit_phase(scenario.name)
        try:
            _measure(scenario, drafter, params, device)
        except RuntimeError as error:
            ended = f"{type(error).__name__} after {_memory_text(_peaks(device))}"
            print(
                f"[{scenario.name}] {ended}; finished before: {', '.join(finished) or 'nothing'}", flush=True
            )
            raise
        finished.append(scenario.name)


def random_row(params: "OomProbeParams", lengths: Sequence[int], device: torch.device) -> dict[str, Any]:
    """Return a forward's arguments: random states and tokens, documents of those lengths, every label."""
    generator = torch.Generator(device=device).manual_seed(params.seed)
    row_length, width = sum(lengths), params.hidden_size
    features = len(params.target_layer_ids) * width
    positions = [torch.arange(length, device=device) + params.position_base for length in lengths]
    return {
        "all_hidden_states": torch.randn(1, row_length, features, generator=generator, device=device),
        "verifier_last_hidden": torch.randn(1, row_length, width, generator=generator, device=device),
        "input_ids": torch.randint(params.vocab_size, (1, row_length), generator=generator, device=device),
        "loss_mask": torch.ones(1, row_length, dtype=torch.int64, device=device),
        "lengths": torch.tensor(lengths),
        "position_ids": torch.cat(positions)[None],
        "use_soft_labels": True,
        "kl_weight": params.kl_weight,
        "gamma": params.gamma,
    }


def _open_device(name: str) -> torch.device:
    device = torch.device(name)
    if device.type == "cpu":
        return device
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) >= count:
        raise NoSuchDevice(
            f"device {name} is not there: torch {torch.__version__} sees {count} CUDA devices; "
            "use --set device=cpu with a smaller size"
        )
    index = device.index or 0
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _describe(device: torch.device) -> str:
    if device.type == "cpu":
        return f"cpu, {torch.get_num_threads()} threads"
    card = torch.cuda.get_device_properties(device)
    return (
        f"{device} {card.name}, {card.total_memory / GIB:.2f} GiB, sm_{card.major}{card.minor}, "
        f"CUDA {torch.version.cuda}"
    )


def _limit_memory(limit_gib: float, device: torch.device) -> str:
    """Cap the allocator so that it and all else on the card stay within the limit; return what to tell."""
    free, total = torch.cuda.mem_get_info(device)
    outside = total - free - torch.cuda.memory_reserved(device)
    allowed = limit_gib * GIB - outside
    if limit_gib * GIB > total or allowed <= 0:
        raise LimitTooLarge(
            f"memory_limit_gib {limit_gib} cannot be simulated: the card has {total / GIB:.2f} GiB, "
            f"{outside / GIB:.2f} GiB of them in use outside the allocator"
        )
    torch.cuda.set_per_process_memory_fraction(allowed / total, device)
    return (
        f"simulated card of {limit_gib} GiB: the allocator may take {allowed / GIB:.2f} GiB, "
        f"{outside / GIB:.2f} GiB are the CUDA context and others; messages show the real capacity"
    )


def _build_drafter(params: "OomProbeParams", device: torch.device) -> DFlashDrafter:
    started = _now(device)
    with device:
        drafter = DFlashDrafter(
            config=params.drafter_config(),
            target_layer_ids=params.target_layer_ids,
            block_size=params.block_size,
            max_anchors=params.max_anchors,
            mask_token_id=params.mask_token_id,
        ).to(getattr(torch, params.dtype))
    trainable = sum(parameter.numel() for parameter in drafter.parameters() if parameter.requires_grad)
    duration_s = _now(device) - started
    print(f"[build] {trainable:,} trainable parameters in {duration_s:.1f} s", flush=True)
    return drafter


def _measure(
    scenario: Scenario, drafter: DFlashDrafter, params: "OomProbeParams", device: torch.device
) -> None:
    row = random_row(params, scenario.lengths, device)
    print(f"[{scenario.name}] {sum(scenario.lengths)} tokens in {len(scenario.lengths)} document(s)")
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    durations_ms: list[float] = []
    for step in range(scenario.iterations):
        values, duration_ms = _step(drafter, row, device, seed=params.seed + step)
        durations_ms.append(duration_ms)
        emit_metric(f"{scenario.name}.iteration_ms", duration_ms, step=step)
        print(f"[{scenario.name}] step {step}: forward + backward {duration_ms:.1f} ms", flush=True)
    mean_ms = sum(durations_ms) / len(durations_ms)
    _report(scenario.name, values | {"mean_ms": mean_ms} | _peaks(device))


def _step(
    drafter: DFlashDrafter, row: dict[str, Any], device: torch.device, *, seed: int
) -> tuple[dict[str, float], float]:
    """Take one forward and backward; return loss and metrics, and the milliseconds it took."""
    started = _now(device)
    loss, metrics = drafter(**row, seed=seed)
    loss.backward()
    duration_ms = (_now(device) - started) * 1e3
    drafter.zero_grad(set_to_none=True)
    values = {"loss": loss.item()} | {name: metrics[name].item() for name in REPORTED_METRICS}
    return values, duration_ms


def _now(device: torch.device) -> float:
    """Return the time in seconds when all that was asked of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _peaks(device: torch.device) -> dict[str, float]:
    """Return peak memory: of this scenario on a GPU, of the process so far on the CPU."""
    if device.type == "cuda":
        return {
            "peak_allocated_gib": torch.cuda.max_memory_allocated(device) / GIB,
            "peak_reserved_gib": torch.cuda.max_memory_reserved(device) / GIB,
        }
    return {"peak_rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / KIB_PER_GIB}


def _report(scenario: str, values: dict[str, float]) -> None:
    for name, value in values.items():
        emit_metric(f"{scenario}.{name}", value)
    quality = ", ".join(f"{name} {values[name]:.4f}" for name in ("loss", *REPORTED_METRICS))
    print(f"[{scenario}] {quality}")
    print(f"[{scenario}] mean {values['mean_ms']:.1f} ms, {_memory_text(values)}", flush=True)


def _memory_text(values: dict[str, float]) -> str:
    peaks = {name: value for name, value in values.items() if name.startswith("peak_")}
    return ", ".join(
        f"{name.removesuffix('_gib').replace('_', ' ')} {value:.2f} GiB" for name, value in peaks.items()
    )
