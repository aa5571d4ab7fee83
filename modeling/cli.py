"""The command `flashcell`: runs one of the project's commands, which come with the package.

flashcell train RECIPE ...       as scripts/train
flashcell evaluate ...           as scripts/evaluate
flashcell export CHECKPOINT OUT  as scripts/export_model
flashcell serve MODEL            OpenAI's HTTP API (serving/)
"""

import os
import sys
from pathlib import Path

COMMANDS = {"train": "train", "evaluate": "evaluate", "export": "export_model"}
USAGE = """usage: flashcell COMMAND ...

    train      trains a language model by a recipe
    evaluate   measures a model's loss on text, or runs lm-evaluation-harness
    export     writes a checkpoint as a repository that loads without flashcell
    serve      answers OpenAI's HTTP API with a model

`flashcell COMMAND --help` says more, `flashcell --version` the version."""


def main() -> None:
    """Runs the command that the first argument names: `serve` here, others in place of this
    process."""
    name, *rest = sys.argv[1:] or [""]
    if name in ("", "-h", "--help"):
        print(USAGE)
    elif name == "--version":
        from . import __version__

        print(f"flashcell {__version__}")
    elif name == "serve":
        from .serving.replicas.command import main as serve

        serve(rest)
    elif name not in COMMANDS:
        raise SystemExit(
            f"{USAGE}\n\nflashcell: the command is {name!r}, but must be one of "
            f"{', '.join([*COMMANDS, 'serve'])}"
        )
    else:
        command = [sys.executable, str(folder() / COMMANDS[name]), *rest]
        sys.stdout.flush()
        os.execv(sys.executable, command)


def folder() -> Path:
    """Returns the folder of the commands: beside this file, or in the checkout that it lies in."""
    here = Path(__file__).resolve().parent
    return here.parent / "scripts" if here.name == "modeling" else here / "scripts"
