"""Tasks that show what a layer can learn, for scripts/tasks."""
