"""Train a drafter for a target.

    python -m dflash.train --config FILE [--set SECTION.SETTING=VALUE]…
    torchrun --nproc-per-node N -m dflash.train --config FILE …
    python -m dflash.train --help-config

The file is JSON or YAML and may begin with `preset: tiny`, `smollm2` or `qwen3.6-27b`; `--help-config` prints
every setting. SIGTERM lets the step end, saves and leaves with 143; the same command goes on from there.
Leaves with 0 when all steps are done, 1 when the training failed, 2 when something is refused.
"""

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

from dflash.probes.params import OneLineParser
from dflash.training.config import TrainConfig
from dflash.training.config_file import help_text, load_config, render
from dflash.training.signals import Stop, stop_on_signals

PROGRAM = "dflash.train"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = OneLineParser(prog=PROGRAM, description="Train a drafter for a target.")
    parser.add_argument("--config", "--params", type=Path, metavar="FILE", help="settings, JSON or YAML")
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.SETTING=VALUE", help="one setting; wins"
    )
    parser.add_argument("--help-config", action="store_true", help="print every setting and its meaning")
    arguments = parser.parse_args(argv)
    if arguments.help_config:
        print(help_text(), end="")
        return 0
    try:
        config = load_config(arguments.config, arguments.set)
    except ValueError as error:
        parser.error(str(error))
    with stop_on_signals() as stop:
        return _train(config, stop)


def _train(config: TrainConfig, stop: Stop) -> int:
    from dflash.training.checkpoint_folder import CannotResume, CannotSave  # noqa: PLC0415  loads torch
    from dflash.training.failures import TrainingFailure  # noqa: PLC0415
    from dflash.training.session import open_session  # noqa: PLC0415

    print(render(config), end="", flush=True)
    with contextlib.ExitStack() as opened:
        try:
            session = opened.enter_context(open_session(config, stop))
        except (ValueError, CannotResume) as error:
            print(f"{PROGRAM}: {error}", file=sys.stderr)
            return 2
        try:
            progress = session.run()
        except (TrainingFailure, CannotSave) as error:
            print(f"{PROGRAM}: {error}", file=sys.stderr)
            return 1
    print(f"[train] {progress.step} steps done, in epoch {progress.epoch}", flush=True)
    return stop.exit_code


if __name__ == "__main__":
    sys.exit(main())
