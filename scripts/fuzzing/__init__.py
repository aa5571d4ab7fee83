"""Random calls of the kernels' functions and ops, for scripts/fuzz: drawn, run and checked."""
