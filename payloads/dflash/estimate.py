"""How much of a card's memory would a program of the payload take, and would it fit? Without a GPU.

    python -m dflash.estimate --entry dflash.probes.oom --card rtx-pro-6000
    python -m dflash.estimate --entry dflash.probes.oom --card 96GiB:sm_120 --alternatives
    python -m dflash.estimate --entry dflash.probes.oom --params params.json --card h200 --json

The program itself runs, on tensors that hold nothing, as it would on the card; what it allocates goes through
a model of torch's allocator. `--json` prints one JSON object, sizes in bytes.

Exit codes: 0 estimated, whatever the verdict; 1 an error; 2 a parameter or an option is refused; 3 this torch
cannot do it.
"""

import argparse
import json
import signal
import sys
from collections.abc import Sequence

from dflash.cards import CARDS, Card, parse_card
from dflash.memory.entries import ENTRIES, Entry, find_entry
from dflash.memory.estimate_view import as_json, as_text
from dflash.memory.estimating import CannotEstimate, Target, check, estimate
from dflash.probes.params import OneLineParser, add_value_options, read_values

PROGRAM = "dflash.estimate"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the estimate and return the exit code.

    Raises:
        SystemExit: after `--help`, or with 2 when something is refused.
    """
    parser = _parser()
    arguments = parser.parse_args(argv)
    try:
        entry = find_entry(arguments.entry)
        values = read_values(arguments.params, arguments.set)
        target = Target(
            card=_card(arguments.card),
            alloc_conf=arguments.alloc_conf,
            memory_limit_bytes=_limit(arguments.memory_limit_bytes),
        )
        check(entry, values, target)
    except ValueError as error:
        parser.error(str(error))
    return _estimate(entry, values, target, arguments)


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog=PROGRAM,
        description="Estimate a program's memory on a card without one.",
        epilog=f"entries: {', '.join(ENTRIES)}\ncards: {', '.join(CARDS)}, or 96GiB:sm_120",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--entry", required=True, metavar="MODULE", help="the program")
    add_value_options(parser)
    parser.add_argument("--card", help="the card to judge by; without it there is no verdict")
    parser.add_argument("--alloc-conf", default="", metavar="TEXT", help="as in PYTORCH_CUDA_ALLOC_CONF")
    parser.add_argument(
        "--memory-limit-bytes", type=int, metavar="N", help="as if the card had no more than this"
    )
    parser.add_argument("--alternatives", action="store_true", help="also estimate what could need less")
    parser.add_argument("--json", action="store_true", help="one JSON object, sizes in bytes")
    return parser


def _card(text: str | None) -> Card | None:
    try:
        return None if text is None else parse_card(text)
    except ValueError as error:
        raise ValueError(f"--card: {error}") from None


def _limit(size: int | None) -> int | None:
    if size is not None and size <= 0:
        raise ValueError(f"--memory-limit-bytes is {size}; it must be greater than 0")
    return size


def _estimate(entry: Entry, values: dict[str, object], target: Target, arguments: argparse.Namespace) -> int:
    try:
        found = estimate(entry, values, target, has_alternatives=arguments.alternatives)
    except CannotEstimate as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 3
    print(json.dumps(as_json(found)) if arguments.json else as_text(found))
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it without a word
    sys.exit(main())
