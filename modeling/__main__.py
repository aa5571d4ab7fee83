"""`python -m flashcell` runs the command `flashcell`."""

from .cli import main

if __name__ == "__main__":
    main()
