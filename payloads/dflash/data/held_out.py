"""Which documents are kept from training, by a hash of their key: not by their order, number or neighbours.

A document stays on its side when others come or go, and a larger share holds out all that a smaller one did.
"""

import hashlib


def is_held_out(key: str, share: float) -> bool:
    """Return whether a document of this key belongs to the held-out share (0 … 1)."""
    digest = hashlib.sha256(b"held out\0" + key.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64
