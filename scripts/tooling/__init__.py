"""What the commands have in common: environment, local Hub, the kernels' builder, house rules."""
