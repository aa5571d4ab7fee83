"""Shared code of the commands: environment, local Hub, the kernels' builder, repository rules."""
