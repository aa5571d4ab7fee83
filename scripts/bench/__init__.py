"""What bench_ops, bench_models and bench_parallel time: ops, models, and how time is taken."""
