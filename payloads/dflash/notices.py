"""What a user should know and nobody asked for: said once, to whoever reads stderr and whoever watches.

Knows nothing of torch.
"""

import warnings

from dflash.events import emit_warning

_said: set[tuple[str, str]] = set()


class DFlashWarning(UserWarning):
    """Something works otherwise than was asked for."""


def warn_once(about: str, message: str, *, cause: str = "") -> None:
    """Say a message as a Python warning and as an event, the first time in this process.

    Messages of one `cause` count as one; without it each message is its own.
    """
    if (about, cause or message) in _said:
        return
    _said.add((about, cause or message))
    emit_warning(about, message)
    warnings.warn(f"{about}: {message}", DFlashWarning, stacklevel=3)
