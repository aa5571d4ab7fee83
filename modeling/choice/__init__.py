"""The choice of backend="auto" between torch.nn's own forward and our kernels."""
