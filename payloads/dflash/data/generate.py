r"""The target answers prompts, and its answers become training data.

    python -m dflash.data.generate --target ~/smollm2/smol.gguf --prompts prompts.jsonl --out answers
    python -m dflash.data.generate --target ~/qwen3 --prompts sharegpt.jsonl --out answers \
        --thinking false --batch-size 512 --max-new-tokens 1024 --max-seconds 500

Prompts are {"prompt": "…"} or conversations, each of whose answers is made anew. `--out` becomes a folder of
token ids that `dflash.data.loading` reads. The same command goes on where it stopped, whatever ended it: a
batch is kept when it is whole, and prompts that have their answer are skipped. Run again after an
interruption, it yields what it would have yielded without.

Exit codes: 0 all prompts have their answer, or the time is up; 1 an error; 2 an option is refused.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash.config import DTYPES
from dflash.data.options import option, parse_options
from dflash.events import emit_phase
from dflash.values import require_choice, require_positive

if TYPE_CHECKING:
    from dflash.data.prompting import PromptReader
    from dflash.target.loading import LoadedTarget

PROGRAM = "dflash.data.generate"


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateParams:
    """Every number of a generation."""

    target: str = option("the target: a folder with safetensors, or a .gguf file")
    prompts: tuple[str, ...] = option("a file or folder of prompts; may be given several times")
    out: str = option("the folder of answers; one that has some is gone on with")
    batch_size: int = option("prompts answered at once", 256)
    max_new_tokens: int = option("the longest answer", 192)
    max_prompt_tokens: int = option("longer prompts are dropped", 512)
    max_seconds: float | None = option("begin no batch that would probably end later than this", None)
    temperature: float = option("0 is greedy", 0.0)
    seed: int = option("of what is drawn at a temperature", 0)
    thinking: bool | None = option("the template's thinking mode: true or false; else left to it", None)
    device: str = option("where the target computes", "cuda")
    dtype: str = option("of its weights", "bfloat16")
    strict: bool = option("a bad prompt is an error: true or false", False)

    def __post_init__(self) -> None:
        require_positive(self, "batch_size", "max_new_tokens", "max_prompt_tokens")
        require_choice("dtype", self.dtype, DTYPES)
        if self.temperature < 0:
            raise ValueError(f"temperature is {self.temperature}; 0 is greedy, above it is sampled")


def main(argv: Sequence[str] | None = None) -> int:
    """Generate and return the exit code.

    Raises:
        SystemExit: after `--help`, or with 2 when an option is refused.
    """
    began = time.monotonic()
    params = parse_options(GenerateParams, argv, program=PROGRAM, description="Let a target answer prompts.")
    try:
        generate(params, began)
    except (ValueError, OSError) as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 1
    return 0


def generate(params: GenerateParams, began: float) -> None:
    """Answer what is not answered yet; `began` is when the time began to run, as time.monotonic() says."""
    from transformers.utils import logging  # noqa: PLC0415

    from dflash.data import answering, files, generating, prompting, shards  # noqa: PLC0415  they load torch
    from dflash.data.chat import Chat  # noqa: PLC0415
    from dflash.target.loading import load_target  # noqa: PLC0415

    quieten: Any = logging.disable_progress_bar  # which has no annotations
    quieten()

    found = files.find_files(params.prompts)
    emit_phase("loading")
    target = load_target(params.target, device=params.device, dtype=params.dtype)
    if target.tokenizer is None:
        raise ValueError(
            f"{params.target} has no tokenizer, without which there are no prompts; add its files"
        )
    _check_length(params, target)
    chat = Chat(target.tokenizer, thinking=params.thinking)
    folder = shards.ShardFolder(
        Path(params.out), _settings(params, chat.description, answering.fingerprint(target))
    )
    reader = prompting.PromptReader(
        target.tokenizer, chat, max_tokens=params.max_prompt_tokens, strict=params.strict
    )
    answerer = answering.Answerer(
        target, max_new_tokens=params.max_new_tokens, temperature=params.temperature
    )
    emit_phase("generating")
    progress = generating.Progress(max_seconds=params.max_seconds, began=began)
    prompts = reader.prompts(files.read_entries(found))
    generating.answer_all(prompts, answerer, folder, progress, batch_size=params.batch_size, seed=params.seed)
    _print_report(reader)


def _settings(params: GenerateParams, rendering: str, fingerprint: str) -> dict[str, Any]:
    drawn = (
        {"temperature": params.temperature, "seed": params.seed}
        if params.temperature
        else {"temperature": 0.0}
    )
    return {
        "target": fingerprint,
        "dtype": params.dtype,
        "rendering": rendering,
        "max_new_tokens": params.max_new_tokens,
        **drawn,
    }


def _check_length(params: GenerateParams, target: "LoadedTarget") -> None:
    most = getattr(target.model.config.get_text_config(), "max_position_embeddings", None)
    asked = params.max_prompt_tokens + params.max_new_tokens
    if most is not None and asked > most:
        raise ValueError(
            f"max_prompt_tokens and max_new_tokens sum to {asked}; the target has {most} positions, lower one"
        )


def _print_report(reader: "PromptReader") -> None:
    for reason, count in reader.report.dropped.most_common():
        print(f"dropped {count:,} prompts: {reason}")
        for example in reader.report.examples[reason]:
            print(f"  {example}")


if __name__ == "__main__":
    sys.exit(main())
