"""plot_bench: the table of tfla's README from the rows of bench_ops --suite tfla."""

from collections.abc import Callable
from pathlib import Path

from _bench_tables_diagonal import Row, Sides, shown, stamp

PASSES = {"forward": "forward", "train": "forward + backward", "step": "a step"}


def shape_of(row: Row) -> str:
    """'exp 8x256x512-B8T8192-chunk64' -> 'exp, 8 heads 256/512, B 8, T 8192'"""
    _, gate, heads, size = row["case"].split("-")[:4]
    count, key, value = heads.split("x")
    batch, steps = size[1:].split("T")
    return f"{gate}, {count} heads {key}/{value}, B {batch}" + (f", T {steps}" * (steps != "1"))


def peers_of(sides: dict[str, dict[str, Row]], which: str) -> str:
    found = [
        (float(p[which]["p50_ms"]), name)
        for name, p in sides.items()
        if name != "ours" and which in p
    ]
    return ", ".join(f"{name} {shown(ms)}" for ms, name in sorted(found))


def marks(path: Path, cases: Sides) -> str:
    """What the kernel was asked to reach: floor, time and the share of the one in the other, mark, peers."""
    rows = [
        (sides, row)
        for sides in cases.values()
        for row in sides.get("ours", {}).values()
        if row["form"] == "must"
    ]
    if not rows:
        return ""
    text = stamp([row for _, row in rows], path)
    text += "| case | pass | floor | time | of the floor | mark | memory | peers |\n"
    text += "|---|---|---|---|---|---|---|---|\n"
    for sides, row in rows:
        ms, floor, mark = (float(row[k]) for k in ("p50_ms", "floor_ms", "limit_ms"))
        limit = shown(mark) if ms <= mark else f"**{shown(mark)}**"
        memory = "" if row["pass"] == "step" else f"{float(row['peak_mib']) * 2**20 / 1e9:.2f} GB"
        text += f"| {shape_of(row)} | {PASSES[row['pass']]} | {shown(floor)} | {shown(ms)} "
        text += f"| {floor / ms:.0%} | {limit} | {memory} | {peers_of(sides, row['pass'])} |\n"
    return text


def tables(read_sides: Callable[[Path], Sides]) -> dict:
    """name -> (function of a result file, the column that tells which files)."""
    return {"tfla-marks": (lambda path: marks(path, read_sides(path)), "limit_ms")}
