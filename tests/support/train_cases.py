"""A recipe that trains in seconds, and text for it."""

from pathlib import Path

import yaml

RECIPE = {
    "name": "tiny",
    "model": {
        "model_type": "flash_rnn",
        "cell": "lstm",
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_heads": 2,
        "tie_word_embeddings": True,
    },
    "vocab_size": 300,
    "python": "3.11.7",
    "corpus_sha256": "another",
    "held_out_in": 4,
    "seed": 1,
    "batch": 4,
    "length": 8,
    "steps": 40,
    "warmup": 5,
    "learning_rate": 3e-3,
    "final_learning_rate": 3e-4,
    "weight_decay": 0.1,
    "clip": 1.0,
    "precision": "bf16",
    "log_every": 1,
    "evaluate_every": 10,
    "checkpoint_every": 7,
}
TEXTS = [f"def f{i}(x):\n    return x * {i % 7} + {i}\n" * (1 + i % 3) for i in range(24)]


def write_text(folder: Path) -> Path:
    """Writes one document to each file."""
    folder.mkdir()
    for i, text in enumerate(TEXTS):
        (folder / f"{i:02}.txt").write_text(text)
    return folder


def write_recipe(path: Path, **changes) -> Path:
    path.write_text(yaml.safe_dump({**RECIPE, **changes}))
    return path


def text_recipe(folder: Path, **changes) -> dict:
    """Returns the tiny recipe with the files of `folder` instead of a standard library."""
    data = {"path": "text", "data_files": [f"{folder}/*.txt"], "sample_by": "document"}
    return {**RECIPE, "python": "", "corpus_sha256": "", "data": data, **changes}
