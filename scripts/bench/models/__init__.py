"""Times of whole models, for bench_models: training steps, prompts, tokens, serving."""
