"""flashcell.kernels: the Python of every kernel, which runs its torch reference without a binary."""
