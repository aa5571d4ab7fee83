"""The input gates as data: the properties of each that validation and the engines need."""

from typing import Dict, NamedTuple


class Cell(NamedTuple):
    name: str
    exponential: bool  # e^i with the running maximum m; else sigmoid(i), and m is 0
    normalized: bool  # h is divided by max(|q n|, e^-m) + eps
    states: int  # C, then n if normalized, then m if exponential


CELLS: Dict[str, Cell] = {
    "exp": Cell("input_gate 'exp'", True, True, 3),
    "sigmoid": Cell("input_gate 'sigmoid'", False, False, 1),
    "sigmoid floor": Cell("input_gate 'sigmoid' with normalize='floor'", False, True, 2),
}
INPUT_GATES = ("exp", "sigmoid")


def find_cell(exponential: bool, normalized: bool) -> Cell:
    """Returns the gate with the properties that the ops take."""
    return next(c for c in CELLS.values() if c[1:3] == (exponential, normalized))


def pick_cell(input_gate: str, normalize) -> Cell:
    """Returns the gate's properties; `normalize` is None or "floor", and the exponential gate is
    always normalized."""
    floor = normalize is not None and input_gate == "sigmoid"
    return CELLS["sigmoid floor" if floor else input_gate]
