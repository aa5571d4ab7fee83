"""flashcell: recurrent networks as fast and ordinary to use as Transformers.

Importing this package registers its model families with the transformers Auto classes.
"""

__version__ = "0.1.0"
