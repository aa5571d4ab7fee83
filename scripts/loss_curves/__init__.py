"""Loss curves of two implementations side by side, for scripts/convergence."""
