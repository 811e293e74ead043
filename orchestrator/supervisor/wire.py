r"""Frames between controller and host: a length, a JSON header, and raw bytes.

A frame is ``<header length>\n<header JSON><body>``; the header's ``size`` is the body's length. Shell
start-up files may print before our process writes, so the host's side of a conversation opens with
`preamble`, and everything before it is noise. Knows nothing of what the headers mean.
"""

import json
from typing import Any, Callable, Dict, Tuple

MAX_HEADER_BYTES = 64 * 1024 * 1024
MAX_BODY_BYTES = 4 * 1024 * 1024
PIECE_BYTES = 1024 * 1024


class WireError(Exception):
    """The bytes are not a frame, or the stream ended inside one."""


def preamble(nonce: str) -> bytes:
    """Returns the line that ends all noise; ``nonce`` is the controller's, fresh for each channel."""
    return b"\n\x00orch-wire-1 " + nonce.encode("ascii") + b"\n"


def pack(header: Dict[str, Any], body: bytes = b"") -> bytes:
    """Returns one frame.

    Raises:
        WireError: the body is longer than `MAX_BODY_BYTES`.
    """
    if len(body) > MAX_BODY_BYTES:
        raise WireError("a frame's body has at most %d bytes, not %d" % (MAX_BODY_BYTES, len(body)))
    head = json.dumps(dict(header, size=len(body)), separators=(",", ":")).encode("ascii")
    return b"%d\n%s%s" % (len(head), head, body)


def read_frame(read_exactly: Callable[[int], bytes]) -> Tuple[Dict[str, Any], bytes]:
    """Reads one frame through ``read_exactly(n)``, which returns n bytes or raises `WireError`.

    Raises:
        WireError: the stream ended or what came is not a frame.
    """
    digits = b""
    while True:
        byte = read_exactly(1)
        if byte == b"\n":
            break
        digits += byte
        if not digits.isdigit() or len(digits) > 9:
            raise WireError("not a frame: %r" % digits)
    if not digits or int(digits) > MAX_HEADER_BYTES:
        raise WireError("not a frame: header length %r" % digits)
    try:
        header = json.loads(read_exactly(int(digits)))
        size = header["size"]
        if type(size) is not int or not 0 <= size <= MAX_BODY_BYTES:
            raise WireError("not a frame: size %r" % (size,))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise WireError("not a frame: %s" % error) from error
    return header, read_exactly(size) if size else b""
