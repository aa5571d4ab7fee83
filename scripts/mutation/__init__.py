"""Faults that the tests must notice, and how they are tried."""
