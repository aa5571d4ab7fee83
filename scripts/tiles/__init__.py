"""Solves for the tile sizes of the CUDA engines under constraints, for plan_tiles."""
