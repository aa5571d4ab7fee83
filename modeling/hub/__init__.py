"""Kernels from the Hub: the lock, downloads and their digests, and the import of what was verified."""
