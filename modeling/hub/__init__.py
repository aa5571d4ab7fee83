"""Loads kernels from the Hub: the lock, downloads, their digests, and imports of verified files."""
