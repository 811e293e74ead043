"""The gradient of a weight: 4 GiB of weights fit below 6 GiB, a gradient of the same size does not."""

import torch

model = torch.nn.Sequential(
    torch.nn.Linear(1024, 1024, device="cuda"), torch.nn.Linear(1024, 2**20, device="cuda")
)
model(torch.randn(4, 1024, device="cuda")).sum().backward()
