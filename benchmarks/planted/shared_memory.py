"""A kernel whose tiles are larger than a processor's shared memory; the card's own memory is empty."""

import torch
import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def square(source, target, SIZE: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: ANN001,ANN201,N803
    """Write the square of a matrix."""
    rows, columns = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None]
    tile = tl.load(source + rows * SIZE + columns)
    tl.store(target + rows * SIZE + columns, tl.dot(tile, tile))


matrix = torch.randn(512, 512, dtype=torch.float32, device="cuda")
square[(1,)](matrix, torch.empty_like(matrix), SIZE=512)
