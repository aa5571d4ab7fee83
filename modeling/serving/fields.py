"""Checks of the fields of a JSON object that a client sends.

A check takes the field's name and its value, and returns the value or raises ApiError, which says
what it was and what it must be.
"""

import json
import math
from collections.abc import Callable
from typing import Any

from .errors import ApiError, shown, wrong

Check = Callable[[str, Any], Any]
MOST_DIGITS = 40  # of a number in JSON


def parse(body: bytes) -> dict[str, Any]:
    """Returns the JSON object in `body`: UTF-8, without duplicate names and without NaN."""
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise malformed(f"is not UTF-8: {error.reason} at byte {error.start}") from None
    try:
        value = json.loads(
            text, object_pairs_hook=_no_duplicates, parse_constant=_no_constant,
            parse_int=_number(int), parse_float=_number(float),
        )  # fmt: skip
    except RecursionError:
        raise malformed("is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise malformed(f"is not JSON: {error.msg} at character {error.pos}") from None
    if not isinstance(value, dict):
        raise malformed(f"is {shown(value)}, but must be a JSON object")
    return value


def malformed(why: str) -> ApiError:
    return ApiError(400, f"the body {why}", code="invalid_body")


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen = set[str]()
        for name, _ in pairs:
            if name in seen:
                raise malformed(f"has {shown(name)} twice in one object")
            seen.add(name)
    return found


def _no_constant(name: str) -> Any:
    raise malformed(f"has {name}, which is not JSON")


def _number(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    def read(digits: str) -> Any:
        if len(digits) > MOST_DIGITS:
            raise malformed(f"has a number of {len(digits)} characters, the most is {MOST_DIGITS}")
        return kind(digits)

    return read


def take(given: dict[str, Any], checks: dict[str, Check], where: str = "") -> dict[str, Any]:
    """Returns the fields that are given and not null, checked; raises for an unknown one."""
    taken = {}
    for name, value in given.items():
        check = checks.get(name)
        if check is None:
            raise ApiError(
                400, f"unknown field {shown(where + name)}", param=(where + name)[:60],
                code="unknown_parameter",
            )  # fmt: skip
        if value is not None:
            taken[name] = check(where + name, value)
    return taken


def integer(low: int, high: int) -> Check:
    def check(name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise wrong(name, value, f"an integer in {low}..{high}")
        return value

    return check


def number(low: float, high: float, above: bool = False) -> Check:
    """Checks a number from `low` (or above it) to `high`."""

    def check(name: str, value: Any) -> float:
        good = isinstance(value, int | float) and not isinstance(value, bool)
        if not good or not math.isfinite(value) or not low <= value <= high:
            raise wrong(name, value, f"a number from {low} to {high}")
        if above and value == low:
            raise wrong(name, value, f"a number above {low}, at most {high}")
        return float(value)

    return check


def boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise wrong(name, value, "true or false")
    return value


def string(least: int = 0, most: int | None = None) -> Check:
    def check(name: str, value: Any) -> str:
        if not isinstance(value, str):
            raise wrong(name, value, "a string")
        if len(value) < least or (most is not None and len(value) > most):
            raise wrong(name, value, f"a string of {least} to {most} characters")
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise wrong(name, value, f"Unicode: {error.reason} at {error.start}") from None
        return value

    return check


def ignored(check: Check) -> Check:
    """Checks a field that changes nothing here."""
    return check


def only(*values: Any) -> Check:
    """Checks a field of OpenAI's that is not supported: it may only say what holds anyway."""

    def check(name: str, value: Any) -> Any:
        if not any(value == one and type(value) is type(one) for one in values):
            must = " or ".join(["left out", *map(shown, values)])
            raise ApiError(
                400, f"{name} is not supported: it is {shown(value)}, but must be {must}",
                param=name, code="unsupported_parameter",
            )  # fmt: skip
        return value

    return check
