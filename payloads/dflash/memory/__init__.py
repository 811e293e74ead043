"""GPU memory before there is a GPU: the payload runs on a simulated card, on which nothing has bytes.

`dflash.memory.log` says what such a run yields, `dflash.memory.trace` runs it. `allocator` says what torch's
caching allocator would reserve for it, `report` where its peaks are, of what, and whether it fits.
`estimating` puts these together for `dflash.estimate`.
"""
