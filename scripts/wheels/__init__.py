"""Builds wheels that carry kernels: pip's backend, and what scripts/build_wheels adds to it."""
