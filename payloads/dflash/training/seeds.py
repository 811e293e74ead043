"""Seeds of what is drawn for one micro-batch: from the run's seed and the micro-batch, never from a rank.

So one micro-batch has the same anchors and noise whoever computes it, and after a resume too.
"""

import hashlib


def seed_for(purpose: str, seed: int, epoch: int, number: int) -> int:
    """Return a seed of 63 bits; each purpose ("anchors", "noise") draws on its own."""
    text = f"{purpose}/{seed}/{epoch}/{number}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
