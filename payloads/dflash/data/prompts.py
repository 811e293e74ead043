"""Prompts that every machine has: questions about what installed libraries say of themselves.

    python -m dflash.data.prompts --out prompts.jsonl
    python -m dflash.data.prompts --out prompts.jsonl --modules json --modules numpy

The first paragraph of each docstring goes into several questions. The same libraries give the same file, in
an order in which every beginning of it speaks of everything. `key` is the docstring, so that all questions on
it, under whatever name, are on one side of the held-out split (held_out.py).

Exit codes: 0 the file is written; 1 it cannot be, or no module has a docstring; 2 an option is refused.
"""

import contextlib
import hashlib
import importlib
import inspect
import io
import json
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from dflash.data.options import option, parse_options

PROGRAM = "dflash.data.prompts"
# These open a browser or a window, or print a poem, when they are imported.
LEFT_OUT = ("antigravity", "idlelib", "this", "tkinter", "turtle", "turtledemo")
STANDARD = tuple(
    name for name in sorted(sys.stdlib_module_names) if not name.startswith("_") and name not in LEFT_OUT
)
OTHERS = (
    "http.client",
    "http.server",
    "urllib.parse",
    "urllib.request",
    "xml.dom.minidom",
    "xml.etree.ElementTree",
    "accelerate",
    "datasets",
    "jax.numpy",
    "matplotlib.pyplot",
    "networkx",
    "numpy",
    "numpy.fft",
    "numpy.linalg",
    "numpy.random",
    "pandas",
    "PIL.Image",
    "pyarrow",
    "scipy.linalg",
    "scipy.optimize",
    "scipy.signal",
    "scipy.sparse",
    "scipy.special",
    "scipy.stats",
    "skimage.filters",
    "skimage.morphology",
    "sklearn.cluster",
    "sklearn.ensemble",
    "sklearn.linear_model",
    "sklearn.metrics",
    "sklearn.preprocessing",
    "statsmodels.api",
    "sympy",
    "torch",
    "torch.distributed",
    "torch.distributions",
    "torch.nn",
    "torch.nn.functional",
    "torch.optim",
    "torch.utils.data",
    "transformers",
)
MODULES = STANDARD + OTHERS
QUESTIONS = (
    "What does {name} do in Python? {summary}",
    "Write a short example that uses {name}.",
    "Explain in simple words: {summary}",
    "Write a Python function similar to {name}. It should do this: {summary}",
    "Give three reasons why someone would use {name}.",
    "Tell a short story about a programmer who needs {name}.",
)
MAX_SUMMARY_CHARACTERS = 200
SIGNATURE = re.compile(r"[\w.]+\(.*\)(\s*->.*)?")
ADDRESS = re.compile(r"0x[0-9a-f]{6,}")  # of an object: another one in every process


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptsParams:
    """Where prompts go, and what they are about."""

    out: str = option("the file of prompts, as JSON lines")
    modules: tuple[str, ...] = option("a module to ask about; may be given several times; else many", ())


def main(argv: Sequence[str] | None = None) -> int:
    """Write the file and return the exit code.

    Raises:
        SystemExit: after `--help`, or with 2 when an option is refused.
    """
    description = "Make prompts of the docstrings of installed libraries."
    params = parse_options(PromptsParams, argv, program=PROGRAM, description=description)
    try:
        written = write_prompts(Path(params.out), params.modules or MODULES)
    except (ValueError, OSError) as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 1
    print(f"{written:,} prompts in {params.out}")
    return 0


def write_prompts(path: Path, modules: Sequence[str]) -> int:
    """Write the prompts about modules, those that are installed, and return how many.

    Raises:
        ValueError: none of the modules is there, or none says anything.
    """
    # Modules of others greet and warn while they are imported and looked at.
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        names = documented(_import(modules))
    if not names:
        raise ValueError(f"no docstrings in {', '.join(modules)}; name modules that are installed")
    prompts = [
        {"prompt": question.format(name=name, summary=summary), "key": summary}
        for summary, name in names.items()
        for question in QUESTIONS
    ]
    prompts.sort(key=lambda prompt: hashlib.sha256(prompt["prompt"].encode()).digest())
    unfinished = path.with_name(f".{path.name}.unfinished")
    with unfinished.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(prompt) + "\n" for prompt in prompts)
    unfinished.rename(path)
    return len(prompts)


def documented(modules: Sequence[ModuleType]) -> dict[str, str]:
    """Return the dotted name of what says each summary; of several that say the same, the shortest."""
    found: dict[str, str] = {}
    for name, member in _members(modules):
        summary = _summary(member)
        if summary:
            known = found.get(summary, name)
            found[summary] = min(known, name, key=lambda one: (len(one), one))
    return found


def _import(names: Sequence[str]) -> list[ModuleType]:
    modules = []
    for name in names:
        with contextlib.suppress(Exception):
            modules.append(importlib.import_module(name))
    return modules


def _members(modules: Sequence[ModuleType]) -> Iterator[tuple[str, object]]:
    for module in modules:
        for name, member in _public(module):
            yield f"{module.__name__}.{name}", member
            if inspect.isclass(member):
                for method_name, method in _public(member):
                    yield f"{module.__name__}.{name}.{method_name}", method


def _public(owner: object) -> Iterator[tuple[str, object]]:
    for name, member in sorted(vars(owner).items()):
        plain = getattr(member, "__func__", member)  # of a class or static method
        if not name.startswith("_") and callable(plain):
            yield name, plain


def _summary(member: object) -> str:
    """Return the first paragraph that says something; in some docstrings a signature stands before it."""
    try:
        text = inspect.getdoc(member)
    except Exception:  # noqa: BLE001  somebody's object may raise whatever it likes
        return ""
    paragraphs = text.strip().split("\n\n") if isinstance(text, str) else []
    lines = (" ".join(paragraph.split()) for paragraph in paragraphs)
    said = next((line for line in lines if not SIGNATURE.fullmatch(line)), "")
    return "" if ADDRESS.search(said) else said[:MAX_SUMMARY_CHARACTERS]


if __name__ == "__main__":
    sys.exit(main())
