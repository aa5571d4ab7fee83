"""Tile sizes of the CUDA engines as a constraint problem, for plan_tiles."""
