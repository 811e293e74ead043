"""Text that a shell, ssh, a terminal or a file system would act on, if it were handed on as it is.

What a shell is to do is always the same, so that one search proves that none did: ``touch PWNED``.
"""

from __future__ import annotations

from collections.abc import Mapping

MARK = "PWNED"

ATTACKS: Mapping[str, str] = {
    "substitution": f"$(touch {MARK})",
    "backticks": f"`touch {MARK}`",
    "semicolon": f"; touch {MARK}",
    "pipe": f"| touch {MARK}",
    "and": f"&& touch {MARK}",
    "newline": f"x\ntouch {MARK}",
    "single quotes": f"'; touch {MARK}; '",
    "double quotes": f'"; touch {MARK}; "',
    "assignment": f"A=B touch {MARK}",
    "variable": "a$HOME",
    "token": "a%h",
    "option": f"-oProxyCommand=touch {MARK}",
    "help": "--help",
    "dash": "-",
    "glob": "*",
    "home": "~root",
    "colon": "one:two folders",
    "nul": f"a\0touch {MARK}",
    "override": f"\u202etouch {MARK}",
    "long": "x" * 4096,
}

NOT_IN_PATHS = ("newline", "colon", "nul", "override", "long")
IN_PATHS = tuple(text for name, text in ATTACKS.items() if name not in NOT_IN_PATHS)
"""Each may be the name of a folder, of whatever path in an inventory."""
