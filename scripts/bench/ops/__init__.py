"""Times of kernels, for bench_ops: each provider of an op is checked first, then timed."""
