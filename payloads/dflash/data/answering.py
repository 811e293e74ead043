"""A target that answers prompts, many at once.

Knows transformers' `generate`; nothing of files. Prompts are padded on the left. Greedy answers are the
target's own argmax: whatever its generation_config.json would change (penalties, sampling) is left out, since
a drafter is judged by the plain distribution. An answer ends with its end-of-turn token or, after
`max_new_tokens`, without one.

Shape letters: N prompts, L tokens of the longest, M of an answer.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from dflash.target.loading import LoadedTarget

GENERATION: Any = GenerationConfig  # whose annotations do not say what it takes


class Answerer:
    """Answers batches of prompts; with a temperature above 0 by sampling, from a seed for each batch.

    The model keeps the answerer's generation settings.
    """

    def __init__(self, target: LoadedTarget, *, max_new_tokens: int, temperature: float) -> None:
        self._model = target.model
        self._ends = end_tokens(target)
        padding = target.tokenizer.pad_token_id
        self._padding = self._ends[0] if padding is None else int(padding)
        self._max_new_tokens = max_new_tokens
        self._config = GENERATION(
            max_new_tokens=max_new_tokens,
            do_sample=temperature > 0,
            temperature=temperature or None,
            top_k=0 if temperature else None,
            eos_token_id=list(self._ends),
            pad_token_id=self._padding,
        )

    @torch.no_grad()
    def answer(self, prompts: Sequence[Sequence[int]], *, seed: int) -> list[list[int]]:
        """Return each prompt's answer as token ids, its end-of-turn token included."""
        prompts_NL, mask_NL = self._padded(prompts)
        torch.manual_seed(seed)
        # What the model brings along would fill whatever a configuration leaves open.
        self._model.generation_config = self._config
        sequences = self._model.generate(
            inputs=prompts_NL, attention_mask=mask_NL, generation_config=self._config
        )
        found_NM = sequences[:, prompts_NL.shape[1] :]
        return [self._cut(tokens) for tokens in found_NM.tolist()]

    def is_finished(self, answer: Sequence[int]) -> bool:
        """Return whether the target ended the answer itself."""
        return bool(answer) and answer[-1] in self._ends

    def _padded(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        longest = max(map(len, prompts))
        rows = [[self._padding] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
        mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        device = self._model.device
        return torch.tensor(rows, device=device), torch.tensor(mask, device=device)

    def _cut(self, tokens: list[int]) -> list[int]:
        ends = (place + 1 for place, token in enumerate(tokens) if token in self._ends)
        return tokens[: next(ends, len(tokens))]


def end_tokens(target: LoadedTarget) -> tuple[int, ...]:
    """Return the ids that end an answer, by the model and by its tokenizer.

    Raises:
        ValueError: neither names one.
    """
    named = target.model.generation_config.eos_token_id
    ends = {int(token) for token in (named if isinstance(named, list) else [named]) if token is not None}
    if target.tokenizer.eos_token_id is not None:
        ends.add(int(target.tokenizer.eos_token_id))
    if not ends:
        raise ValueError(
            "the target has no token that ends an answer; set eos_token in its tokenizer_config.json"
        )
    return tuple(sorted(ends))


def fingerprint(target: LoadedTarget) -> str:
    """Return a hash by which another target, or another precision, is told from this one."""
    rows: Tensor = target.model.get_input_embeddings().weight[:16]
    content = rows.detach().float().cpu().numpy().tobytes() + str(rows.dtype).encode()
    return hashlib.sha256(content).hexdigest()[:16]
