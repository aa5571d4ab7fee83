"""Generating text: decoded tokens, batches of requests, and what `generate` does differently."""

from ..utils.old_paths import answer_for_old_module

answer_for_old_module(__name__)  # flashcell.generation was a module, of which there may be pickles
