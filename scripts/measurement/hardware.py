"""Measured peak rates of one H200, which measured times are compared with."""

BANDWIDTH = 4.3e12  # bytes/s of reading and writing global memory
RATE = 790e12  # FLOP/s of dense bf16 matrix products
