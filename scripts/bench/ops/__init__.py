"""Benchmarks of kernels, for bench_ops: each provider of an op is checked, then timed."""
