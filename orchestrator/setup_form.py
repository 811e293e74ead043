"""The key ``setup:`` of a host and of an experiment: what has to be prepared there before a run."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.errors import UsageError
from orchestrator.strict_model import Key, StrictModel
from orchestrator.text import check_text
from orchestrator.yaml_source import Source

__all__ = ["Setup", "SetupForm", "read_setup"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """One file that prepares: ``kind`` is requirements (pip's) or script, ``where`` is who says so.

    ``path`` is relative to the payload for an experiment's, to the inventory for a host's. What requirements
    install stands upon the packages of the interpreter that the host has, or, without ``system_packages``,
    upon none.
    """

    kind: str
    path: str
    system_packages: bool
    where: str


class SetupForm(StrictModel):
    """The key as it stands in a file."""

    requirements: str | None = None
    script: str | None = None
    system_packages: bool | None = None


def read_setup(source: Source, form: SetupForm | None, *here: Key) -> Setup | None:
    """Returns what a file says; None where it says nothing.

    Raises:
        ConfigError: it names no file, or two, or one that it may not.
    """
    if form is None:
        return None
    given = {kind: path for kind in ("requirements", "script") if (path := getattr(form, kind)) is not None}
    if len(given) != 1:
        raise source.error("must have one of requirements and script", *here)
    ((kind, path),) = given.items()
    with source.at(*here, kind):
        check_text("a file's path", path)
        if path.startswith(("/", "~")) or any(part in ("", ".", "..") for part in path.split("/")):
            raise UsageError(f"{path!r} must be relative, without '.' and '..': the file is shipped")
    if form.system_packages is not None and kind == "script":
        raise source.error("has no meaning for a script", *here, "system_packages")
    has_system = form.system_packages is not False
    return Setup(kind=kind, path=path, system_packages=has_system, where=source.where(*here, kind))
