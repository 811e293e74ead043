"""AdamW's moments: weights and gradients of 2 GiB each fit below 7 GiB, two moments more do not."""

import torch

model = torch.nn.Sequential(*(torch.nn.Linear(8192, 8192, bias=False, device="cuda") for _ in range(8)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
model(torch.randn(16, 8192, device="cuda")).sum().backward()
optimizer.step()
