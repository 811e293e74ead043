"""One line about how far a training is: replaced in place on a terminal, one after the other elsewhere."""

import sys
from collections.abc import Callable, Mapping
from typing import TextIO

TO_LINE_END = "\x1b[K"


class ProgressLine:
    """A line on stdout, or on another stream."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stdout if stream is None else stream
        self._is_terminal = self._stream.isatty()
        self._is_open = False

    def show(self, text: str) -> None:
        """Show what replaces the line shown before."""
        if self._is_terminal:
            self._write(f"\r{text}{TO_LINE_END}")
            self._is_open = True
        else:
            self._write(f"{text}\n")

    def say(self, text: str) -> None:
        """Say what stays, above the line that is shown next."""
        self.end()
        self._write(f"{text}\n")

    def end(self) -> None:
        """Leave the line as it is; what is written next begins below it."""
        if self._is_open:
            self._write("\n")
            self._is_open = False

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def progress_text(step: int, total_steps: int, values: Mapping[str, float]) -> str:
    """Return a journal's record as one line; figures that are not there are left out, as are skips of 0."""
    parts = [f"step {step}/{total_steps}"]
    for name, form in _SHOWN.items():
        if f"train.{name}" in values:
            parts.append(form(values[f"train.{name}"]))
    skipped = [
        f"{values[f'train.{name}']:.0f} {words}"
        for name, words in _SKIPPED.items()
        if values.get(f"train.{name}")
    ]
    if skipped:
        parts.append(f"so far {', '.join(skipped)}")
    left_s = values["train.step_ms"] / 1e3 * max(total_steps - step, 0)
    parts.append(f"{_duration_text(left_s)} left")
    return " · ".join(parts)


def _duration_text(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


_SHOWN: dict[str, Callable[[float], str]] = {
    "loss": lambda value: f"loss {value:.4f}",
    "accuracy": lambda value: f"accuracy {value:.3f}",
    "avg_streak": lambda value: f"streak {value:.2f}",
    "lr": lambda value: f"lr {value:.2e}",
    "grad_norm": lambda value: f"norm {value:.3g}",
    "tokens_per_s": lambda value: f"{value:,.0f} tokens/s",
    "mfu": lambda value: f"MFU {value:.1%}",
    "peak_allocated_gib": lambda value: f"{value:.1f} GiB",
    "queue_depth": lambda value: f"queue {value:.0f}",
}
_SKIPPED = {
    "nonfinite_micro_batches": "non-finite rows",
    "rows_without_loss": "rows without loss",
    "skipped_steps": "skipped steps",
}
