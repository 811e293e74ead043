"""More weights than the card has: sixteen layers of 1 GiB below 10 GiB."""

import torch

model = torch.nn.Sequential(*(torch.nn.Linear(16384, 16384, bias=False, device="cuda") for _ in range(16)))
