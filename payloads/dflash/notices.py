"""What a user should know and nobody asked for: said once, to whoever reads stderr and whoever watches.

Knows nothing of torch.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from dflash.events import emit_warning

_said: set[tuple[str, str]] = set()
_heard: ContextVar[dict[tuple[str, str], str] | None] = ContextVar("heard", default=None)


class DFlashWarning(UserWarning):
    """Something works otherwise than was asked for."""


def warn_once(about: str, message: str, *, cause: str = "") -> None:
    """Say a message as a Python warning and as an event, the first time in this process.

    Messages of one `cause` count as one; without it each message is its own.
    """
    heard = _heard.get()
    if heard is not None:
        heard.setdefault((about, cause or message), f"{about}: {message}")
        return
    if (about, cause or message) in _said:
        return
    _said.add((about, cause or message))
    emit_warning(about, message)
    warnings.warn(f"{about}: {message}", DFlashWarning, stacklevel=3)


@contextmanager
def heard() -> Iterator[list[str]]:
    """Collect what this thread would say, once each, and say nothing; for what runs on no real machine."""
    messages: dict[tuple[str, str], str] = {}
    told: list[str] = []
    token = _heard.set(messages)
    try:
        yield told
    finally:
        _heard.reset(token)
        told.extend(messages.values())
