"""Quality of a model, for scripts/evaluate: text by token and position, tasks of lm-eval."""
