"""Benchmarks for bench_ops, bench_models and bench_parallel: cases, measurements and timing."""
