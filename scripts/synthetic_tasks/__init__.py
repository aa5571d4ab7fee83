"""Synthetic tasks that test what a layer can learn, for scripts/tasks."""
