"""Text generation: the decoding engine, continuous batching, and overrides of `generate`."""

from ..utils.old_paths import answer_for_old_module

answer_for_old_module(__name__)  # flashcell.generation was a module, of which there may be pickles
