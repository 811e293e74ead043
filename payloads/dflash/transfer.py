"""From the host to a device without waiting for what the device is busy with.

A copy from ordinary memory waits until the device has done all that it was given; one from pinned memory
takes its place in the queue.
"""

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a host tensor on the device, at a time when the device gets to it."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
