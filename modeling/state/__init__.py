"""Recurrent states: the cache, files, document boundaries, and context parallelism."""
