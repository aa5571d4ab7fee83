"""flashcell.kernels: the Python of every kernel, which runs its torch reference without a binary."""

from pathlib import Path

# In a checkout the folders beside this file are kernel projects, found by the editable install and not
# here: Python would take `tfla` for a package without code.
__path__ = [folder for folder in __path__ if not Path(folder, "builder").is_dir()]
