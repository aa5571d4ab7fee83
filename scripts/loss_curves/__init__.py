"""Compares the loss curves of two implementations, for scripts/convergence."""
