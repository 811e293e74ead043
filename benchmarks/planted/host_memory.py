"""Asks the machine itself, not the card, for more than there can be."""

import torch

torch.empty(2**62, dtype=torch.uint8)
