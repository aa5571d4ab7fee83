"""Shared code of the commands: environment, local Hub, the kernels' builder, tests."""
