"""Tests of the kernels' ops; each kernel's own are in its folder, and import each other as ops.x.y."""
