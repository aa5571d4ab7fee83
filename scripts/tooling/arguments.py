"""Types of command-line arguments, checked before an environment is made. Standard library only."""

import argparse
import math
import re
from collections.abc import Callable
from pathlib import Path

GPU_FILES = ("/dev/nvidiactl", "/dev/dxg")  # one of NVIDIA's driver, one of WSL
RECIPES = Path(__file__).resolve().parents[1] / "recipes"
HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


def file(name: str) -> Path:
    path = Path(name)
    if not path.is_file():
        problem = "is a folder" if path.is_dir() else "does not exist"
        raise argparse.ArgumentTypeError(f"{name} {problem}, but must be a file")
    return path


def recipe(name: str) -> Path:
    """Takes a file, or the name of one of scripts/recipes."""
    shipped = RECIPES / f"{name.removesuffix('.yaml')}.yaml"
    is_shipped = not Path(name).exists() and Path(name).name == name and shipped.is_file()
    return shipped if is_shipped else file(name)


def file_or_folder(name: str) -> Path:
    path = Path(name)
    if not path.exists():
        raise argparse.ArgumentTypeError(f"{name} does not exist, but must be a file or a folder")
    return path


def model(name: str) -> str:
    """Takes a folder with a config.json, or a name on the Hub: org/name."""
    path = Path(name)
    # `model_cards/nothing` has the form of a name on the Hub, but model_cards is a folder here
    near = path if path.parent == Path() else path.parent
    is_hub_name = HUB_NAME.fullmatch(name) and not near.exists()
    if not is_hub_name and not (path / "config.json").is_file():
        problem = "has no config.json" if path.is_dir() else "is no folder"
        raise argparse.ArgumentTypeError(
            f"{name} {problem}, but must be a model's folder or a name on the Hub (org/name)"
        )
    return name


def device(name: str) -> str:
    if name == "cuda" and not any(Path(path).exists() for path in GPU_FILES):
        raise argparse.ArgumentTypeError(
            f"cuda needs an NVIDIA GPU and its driver, but there is no {GPU_FILES[0]}"
        )
    return name


def whole(least: int) -> Callable[[str], int]:
    """Returns the type of whole numbers of at least `least`."""

    def read(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"it is {text}, but must be at least {least}")
        return value

    read.__name__ = "whole number"  # argparse shows this name if int() refuses
    return read


def above_zero(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:  # nan is neither
        raise argparse.ArgumentTypeError(f"it is {text}, but must be a finite number above 0")
    return value


above_zero.__name__ = "number"
