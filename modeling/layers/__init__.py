"""Layers: replacements for torch.nn's recurrent modules, diagonal RNNs, and the models' mixers."""

from ..utils.old_paths import answer_for_old_module

answer_for_old_module(__name__)  # flashcell.layers was a module, of which there may be pickles
