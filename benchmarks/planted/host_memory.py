"""Asks the machine itself, not the card, for 64 TiB."""

import torch

torch.empty(2**46, dtype=torch.uint8)
