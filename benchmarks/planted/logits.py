"""Rows over the vocabulary, widened to float32 as a loss does it: 8,192 × 248,320 × 4 bytes are 7.58 GiB."""

import torch

hidden = torch.randn(8192, 1024, dtype=torch.bfloat16, device="cuda")
lm_head = torch.nn.Linear(1024, 248320, bias=False, dtype=torch.bfloat16, device="cuda")
logits = lm_head(hidden)
loss = torch.nn.functional.cross_entropy(logits.float(), torch.zeros(8192, dtype=torch.int64, device="cuda"))
loss.backward()
