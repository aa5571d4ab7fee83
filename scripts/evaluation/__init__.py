"""Model evaluation, for scripts/evaluate: perplexity, loss by position, lm-eval tasks."""
