"""Benchmarks of whole models, for bench_models: training, prefill, decoding, serving."""
