"""Batch by batch: what is answered, what is still to do, and how fast it goes.

Knows the order of the work and the clock; answering.py knows how a target answers, shards.py how answers are
kept.
"""

import hashlib
import itertools
import time
from collections.abc import Iterable, Iterator

from dflash.data.answering import Answerer
from dflash.data.prompting import Prompt
from dflash.data.shards import ShardFolder
from dflash.events import emit_metric


class Progress:
    """Time, counts and how fast it goes."""

    def __init__(self, *, max_seconds: float | None, began: float) -> None:
        self._max_seconds = max_seconds
        self._began = began
        self._longest_batch_s = 0.0
        self._tokens = 0
        self.prompts = 0

    def is_time_up(self) -> bool:
        """Return whether one more batch, as long as the longest so far, would end too late."""
        elapsed_s = time.monotonic() - self._began
        return self._max_seconds is not None and elapsed_s + self._longest_batch_s > self._max_seconds

    def count(self, number: int, prompts: int, tokens: int, seconds: float) -> None:
        """Count a batch, and say how fast it went."""
        self._longest_batch_s = max(self._longest_batch_s, seconds)
        self._tokens += tokens
        self.prompts += prompts
        rate = tokens / seconds
        print(
            f"batch {number}: {prompts:,} prompts, {tokens:,} answer tokens in {seconds:.1f} s, "
            f"{rate:,.0f} tokens/s; {self.prompts:,} prompts answered",
            flush=True,
        )
        emit_metric("generate.tokens_per_s", rate, step=number)
        emit_metric("generate.answer_tokens", self._tokens, step=number)
        emit_metric("generate.prompts", self.prompts, step=number)


def answer_all(
    prompts: Iterable[Prompt],
    answerer: Answerer,
    folder: ShardFolder,
    progress: Progress,
    *,
    batch_size: int,
    seed: int,
) -> None:
    """Answer in batches, a shard for each, what is not answered yet, until all is or the time is up."""
    answered = folder.answered()
    for name in folder.removed:
        print(f"{name} was not whole; its prompts are answered again", flush=True)
    for number, batch in enumerate(_batches(prompts, batch_size)):
        open_prompts = [prompt for prompt in batch if prompt.digest not in answered]
        progress.prompts += len(batch) - len(open_prompts)
        if not open_prompts:
            continue
        if progress.is_time_up():
            print(f"the time is up after {progress.prompts:,} prompts; the same command goes on", flush=True)
            return
        counts = _answer_batch(number, open_prompts, answerer, folder, seed)
        progress.count(number, *counts)
    print(f"all {progress.prompts:,} prompts have their answer", flush=True)


def _batches(prompts: Iterable[Prompt], size: int) -> Iterator[tuple[Prompt, ...]]:
    """Yield prompts in batches that do not depend on which of them are answered already."""
    remaining = iter(prompts)
    while batch := tuple(itertools.islice(remaining, size)):
        yield batch


def _answer_batch(
    number: int,
    prompts: list[Prompt],
    answerer: Answerer,
    folder: ShardFolder,
    seed: int,
) -> tuple[int, int, float]:
    """Return how many prompts and answer tokens it were, and seconds."""
    started = time.monotonic()
    answers = answerer.answer([prompt.tokens for prompt in prompts], seed=_seed_of(prompts, seed))
    found = [
        {
            "prompt": prompt.digest,
            "key": prompt.key,
            "is_finished": answerer.is_finished(answer),
            "input_ids": [*prompt.tokens, *answer],
            "loss_mask": [0] * len(prompt.tokens) + [1] * len(answer),
        }
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    folder.write(number, found)
    return len(prompts), sum(map(len, answers)), time.monotonic() - started


def _seed_of(prompts: Iterable[Prompt], seed: int) -> int:
    """Return the batch's own seed, with which it draws the same whenever its turn comes."""
    text = "".join([str(seed), *(prompt.digest for prompt in prompts)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
