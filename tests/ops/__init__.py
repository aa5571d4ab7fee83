"""Tests of the kernels' ops; those of one kernel are in its folder, and import each other as ops.x.y."""
