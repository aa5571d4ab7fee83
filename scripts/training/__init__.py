"""A training run, for scripts/train: data, steps, checkpoints, monitors, the model card."""
