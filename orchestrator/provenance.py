"""Which commit a folder's files come from, as git tells it.

Knows how to ask git without a shell, without its locks and without its credentials. Whatever keeps git from
answering leaves the fields empty: a payload need not be in a repository.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = ["Commit", "Provenance", "ask_git", "commits_between"]

_TIMEOUT_S = 20.0
_MOST_COMMITS = 50


@dataclass(frozen=True, kw_only=True, slots=True)
class Provenance:
    """Where shipped files come from; None where git tells nothing.

    ``untracked`` counts those that git does not track, ignored ones included. ``dirty`` says that the shipped
    files are not what ``commit`` holds; the rest of the repository does not matter. ``diff_sha256`` is the
    object that holds the tracked files' change against the commit.
    """

    commit: str | None = None
    branch: str | None = None
    dirty: bool = False
    untracked: int = 0
    remote: str | None = None
    diff_sha256: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Returns the form that stands in a job."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    """A commit that one of two others has behind it and the other has not; ``id`` is shortened."""

    id: str
    subject: str
    is_only_in_first: bool


def commits_between(folder: Path, first: str, second: str) -> tuple[Commit, ...] | None:
    """Returns what lies between two commits, the newest first, at most `_MOST_COMMITS`.

    None where git does not know both of them here.
    """
    if not all(re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", commit) for commit in (first, second)):
        return None
    try:
        output = _git(folder, *_LOG, f"{first}...{second}", "--")
    except _GitSaysNothing:
        return None
    fields = [line.split("\0", 2) for line in output.decode("utf-8", "replace").split("\n")[:-1]]
    return tuple(
        Commit(id=short, subject=subject, is_only_in_first=mark == "<") for mark, short, subject in fields
    )


def ask_git(
    folder: Path, *, shipped: Sequence[str], excluded: Iterable[str], within: str = "."
) -> tuple[Provenance, bytes]:
    """Returns where ``shipped`` (paths below ``folder``) come from, and the diff of ``within`` to the commit.

    ``within`` is a pathspec below ``folder``: what else lies there does not matter.

    What a name pattern in ``excluded`` keeps from being shipped stays out of the diff too: it can be secret.
    """
    try:
        status = _git(
            folder, "status", "--porcelain=v2", "--branch", "-z", "--untracked-files=no", "--", within
        )
        headers, is_changed = _parse_status(status)
        has_commit = headers.get("branch.oid") != "(initial)"
        diff = (
            _git(folder, *_DIFF, "--", within, *_exclusions(excluded)) if is_changed and has_commit else b""
        )
        tracked = set(_git(folder, "ls-files", "-z", "--", within).split(b"\0"))
    except _GitSaysNothing:
        return Provenance(), b""
    untracked = sum(path.encode() not in tracked for path in shipped)
    branch = headers.get("branch.head")
    provenance = Provenance(
        commit=headers.get("branch.oid") if has_commit else None,
        branch=None if branch == "(detached)" else branch,
        dirty=bool(diff) or untracked > 0 or not has_commit,
        untracked=untracked,
        remote=_remote(folder),
    )
    return provenance, diff


class _GitSaysNothing(Exception):
    """No git, no repository, one that git does not trust, or no answer in time."""


def _git(folder: Path, *arguments: str) -> bytes:
    env = {name: value for name, value in os.environ.items() if name not in _GIT_PLACES}
    env |= {"GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
    argv = ["git", "-c", "core.fsmonitor=false", *arguments]
    try:
        done = subprocess.run(
            argv,
            cwd=folder,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise _GitSaysNothing from error
    return done.stdout


def _parse_status(output: bytes) -> tuple[dict[str, str], bool]:
    """Returns the headers, and whether anything follows them."""
    lines = output.decode("utf-8", "replace").split("\0")[:-1]
    headers = [line[2:].partition(" ") for line in lines if line.startswith("# ")]
    return {key: value for key, _, value in headers}, len(lines) > len(headers)


def _exclusions(patterns: Iterable[str]) -> Iterator[str]:
    for pattern in patterns:
        yield f":(exclude,icase,glob)**/{pattern}"
        yield f":(exclude,icase,glob)**/{pattern}/**"


def _remote(folder: Path) -> str | None:
    """Returns the address of origin, or of the first remote there is."""
    try:
        output = _git(folder, "config", "-z", "--get-regexp", r"^remote\..*\.url$")
    except _GitSaysNothing:
        return None  # git's way to say that none matches
    lines = output.decode("utf-8", "replace").split("\0")[:-1]
    urls = {key: url for key, _, url in (line.partition("\n") for line in lines)}
    return _without_credentials(urls.get("remote.origin.url") or next(iter(urls.values())))


def _without_credentials(url: str) -> str | None:
    """Drops ``user:token@`` and the query, where tokens stand too (``git@host:path`` can hold none).

    None for a URL that is malformed, as the token may be anywhere in it.
    """
    scheme, separator, rest = url.partition("://")
    if not separator:
        return url
    authority, slash, path = re.split(r"[?#]", rest, maxsplit=1)[0].partition("/")
    host = authority.rpartition("@")[2]
    if not re.fullmatch(r"(?:\[[^]]*\]|[^:]*)(?::[0-9]*)?", host):
        return None
    return f"{scheme}://{host}{slash}{path}"


_DIFF = (
    *("-c", "diff.noprefix=false", "-c", "diff.mnemonicPrefix=false"),
    *("diff", "HEAD", "--no-color", "--no-ext-diff", "--no-textconv", "--no-renames", "--no-relative"),
)
_LOG = (
    *("-c", "log.showSignature=false"),
    *("log", "--left-right", "--no-color", f"--max-count={_MOST_COMMITS}", "--format=%m%x00%h%x00%s"),
)
_GIT_PLACES = frozenset(
    f"GIT_{name}"
    for name in ("DIR", "WORK_TREE", "INDEX_FILE", "COMMON_DIR", "OBJECT_DIRECTORY", "NAMESPACE", "PREFIX")
)
