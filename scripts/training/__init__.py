"""The parts of scripts/train: data, steps, checkpoints, monitors, the model card."""
