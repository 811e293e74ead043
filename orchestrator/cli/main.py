"""The ``orch`` command: which commands there are, and how their errors become one line and an exit code.

Commands are imported when they are called, so that ``orch --help`` costs next to nothing.

Exit codes: 0 good, 1 the run's verdict is not good, `doctor` found a fault or an estimate does not fit, 2 the
input was refused and nothing was done, 3 a host cannot do it, 4 this machine cannot store it, 5 records are
not what they were, 130 and 143 the view was left by Ctrl-C or SIGTERM (the run goes on).
"""

from __future__ import annotations

import errno
import gc
import importlib
import os
import sys
from pathlib import Path
from typing import NamedTuple, NoReturn

import click

from orchestrator.errors import OrchError, StorageError
from orchestrator.text import did_you_mean, printable


class _Entry(NamedTuple):
    module: str
    summary: str
    function: str | None = None  # where a command's name is none for a function


COMMANDS = {
    "run": _Entry("run", "Run an experiment or a script on hosts, follow it, end with a verdict."),
    "estimate": _Entry("estimate", "Say what an experiment's runs will hold on a card, without one."),
    "exec": _Entry("execute", "Run any command on a host as a run; nothing is sent.", "execute"),
    "rerun": _Entry("run", "Run the same code and job once more, as a new run."),
    "prepare": _Entry("prepare", "Prepare on a host what its runs need, once."),
    "logs": _Entry("logs", "Show a run's output, every line with its source."),
    "ps": _Entry("ps", "List runs, the newest first."),
    "show": _Entry("inspect", "Show what is known of a run."),
    "explain": _Entry(
        "explain", "Say why a run ran out of memory: which tensor, who held the rest, what fits."
    ),
    "diff": _Entry("compare", "Show what differs between two runs."),
    "wait": _Entry("inspect", "Wait until a run has ended; exit like `orch run`."),
    "cancel": _Entry("inspect", "End a run and everything it started."),
    "fetch": _Entry("fetch", "Bring files that a run wrote from its host to here."),
    "verify": _Entry("verify", "Prove that a run's records and code are unaltered."),
    "reconcile": _Entry("housekeeping", "Find out how every run whose end is not known stands."),
    "gc": _Entry("housekeeping", "Remove what ended runs left on hosts and here."),
    "ledger": _Entry("housekeeping", "Make the ledger anew from the runs' records."),
    "doctor": _Entry("doctor", "Say what keeps runs from working on hosts, and what to do."),
    "shell": _Entry("shell", "Open a shell on a host, or run one command there."),
    "hosts": _Entry("hosts", "List the hosts of the inventory; add one, or pin its new key."),
}


CONNECTING = ("run", "exec", "rerun", "shell")
"""Commands that need the host that they name in any case."""


class LazyGroup(click.Group):
    """Knows its commands by name and summary; imports one when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """Returns the names in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Imports a command's module; None for a name that is none of ours."""
        entry = COMMANDS.get(cmd_name)
        if entry is None:
            return None
        module = importlib.import_module(f"orchestrator.cli.{entry.module}")
        command = getattr(module, entry.function or cmd_name)
        assert isinstance(command, click.Command)
        gc.freeze()
        gc.enable()
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Names what is near to a command that does not exist; the host's part of a log-in begins here."""
        if args and args[0] not in COMMANDS:
            raise click.UsageError(f"no command {args[0]!r}{did_you_mean(args[0], COMMANDS)}")
        if args and args[0] in CONNECTING:
            from orchestrator.cli.early import connect_early  # noqa: PLC0415

            connect_early(args[0], args[1:])
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """Writes the table without importing anything."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.summary) for name, entry in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="orch")
def cli() -> None:
    """Run experiments on GPU machines you do not sit at, and know afterwards what ran.

    Hosts stand in inventory.yaml, the nearest one upward from here; runs are kept in .orch beside it (or in
    ORCH_HOME).
    """


def main() -> NoReturn:
    """Runs the command line; the only place where errors become exit codes."""
    gc.disable()  # until the command is imported: all of it stays, and to look for garbage there takes time
    _prepare_streams()
    try:
        code = cli.main(standalone_mode=False)
        sys.stdout.flush()
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(2)
    except click.UsageError as error:
        _fail(f"{printable(error.format_message())} (see {_called(error)} --help)", 2)
    except click.Abort:
        sys.exit(130)
    except OrchError as error:
        _fail(printable(str(error)), error.exit_code)
    except BrokenPipeError:
        leave_stdout()
        sys.exit(141)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EIO, errno.EDQUOT):
            raise
        leave_stdout()
        _fail(f"cannot write the output: {error}", StorageError.exit_code)
    finally:
        if "orchestrator.transports" in sys.modules:
            sys.modules["orchestrator.transports"].drop_early()
    sys.exit(code if isinstance(code, int) else 0)


def _prepare_streams() -> None:
    """A closed stream becomes /dev/null, and a character that a terminal cannot show its escape."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            stream = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115  (as long as we live)
            setattr(sys, name, stream)
        stream.reconfigure(errors="backslashreplace")


def _called(error: click.UsageError) -> str:
    """Returns the command that refuses its words; click's parser does not always say."""
    if error.ctx:
        return error.ctx.command_path
    return " ".join(["orch", *(word for word in sys.argv[1:2] if word in COMMANDS)])


def leave_stdout() -> None:
    """Points standard output nowhere once its reader has gone: the interpreter flushes it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(message: str, code: int) -> NoReturn:
    """Writes one line, and what to do next on a second one where it is long."""
    sys.stderr.write(f"orch: {message}\n".replace(". Next: ", ".\norch: next: "))
    sys.exit(code)
