"""Makes the tables of tfla's notebook from the rows of bench_ops --suite tfla."""

import re
from collections.abc import Callable
from pathlib import Path

from report.tables_diagonal import Providers, Row, shown, stamp

PASSES = {"forward": "forward", "train": "forward + backward", "step": "a step"}
STAR = "\\*"


def shape_of(row: Row) -> str:
    """Formats a shape: 'exp 8x256x512-B8T8192-chunk64' -> 'exp, 8 heads 256/512, B 8, T 8192'"""
    _, gate, heads, size = row["case"].split("-")[:4]
    count, key, value = heads.split("x")
    batch, steps = size[1:].split("T")
    return f"{gate}, {count} heads {key}/{value}, B {batch}" + (f", T {steps}" * (steps != "1"))


def time_of(row: Row) -> str:
    """Formats a row's ms, marked if it has a note; a dash if it was not timed."""
    return f"{float(row['p50_ms']):.3g}{STAR * bool(row.get('note'))}" if row["p50_ms"] else "–"


def peers_of(providers: dict[str, dict[str, Row]], which: str) -> str:
    rows = [(name, p[which]) for name, p in providers.items() if name != "ours" and which in p]
    found = [(float(row["p50_ms"]), name, row) for name, row in rows if row["p50_ms"]]
    return ", ".join(
        f"{name} {shown(ms)}{STAR * bool(row.get('note'))}" for ms, name, row in sorted(found)
    )


def notes(cases: Providers, form: str) -> str:
    """Returns the notes below a table: peers that did not run, or not as published."""
    marked: dict[str, None] = {}
    untimed: dict[tuple[str, ...], dict[str, None]] = {}
    for row in (
        row for providers in cases.values() for p in providers.values() for row in p.values()
    ):
        note = row["form"] == form and row.get("note")
        if note and row["p50_ms"]:
            marked[f"- {STAR} {row['provider']}: {note}\n"] = None
        elif note:
            place = " ".join(row["case"].split("-")[1:])
            untimed.setdefault((row["provider"], PASSES[row["pass"]], note), {})[place] = None
    lines = [
        f"- {provider}, {which}: not timed in {', '.join(places)}: {note}\n"
        for (provider, which, note), places in untimed.items()
    ]
    return "\n" * bool(marked or lines) + "".join([*marked, *lines])


def marks(path: Path, cases: Providers) -> str:
    """Makes the table of targets: floor, time, fraction of the floor, target, peers."""
    rows = [
        (providers, row)
        for providers in cases.values()
        for row in providers.get("ours", {}).values()
        if row["form"] == "must"
    ]
    if not rows:
        return ""
    text = stamp([row for _, row in rows], path)
    text += "| case | pass | floor | time | of the floor | mark | memory | peers |\n"
    text += "|---|---|---|---|---|---|---|---|\n"
    for providers, row in rows:
        ms, floor, mark = (float(row[k]) for k in ("p50_ms", "floor_ms", "limit_ms"))
        limit = shown(mark) if ms <= mark else f"**{shown(mark)}**"
        memory = "" if row["pass"] == "step" else f"{float(row['peak_mib']) * 2**20 / 1e9:.2f} GB"
        text += f"| {shape_of(row)} | {PASSES[row['pass']]} | {shown(floor)} | {shown(ms)} "
        text += f"| {floor / ms:.0%} | {limit} | {memory} | {peers_of(providers, row['pass'])} |\n"
    return text + notes(cases, "must")


def sweep(path: Path, cases: Providers, form: str, group: Callable[[Row], str]) -> str:
    """Makes a table of forward / forward + backward ms, a line per group and provider, over the
    chunk size or the shape."""
    lines: dict[tuple[str, str], dict[str, str]] = {}
    rows = []
    for providers in cases.values():
        for provider, passes in providers.items():
            row = passes.get("forward")
            if row is None or row["form"] != form:
                continue
            rows.append(row)
            both = [time_of(passes[k]) if k in passes else "–" for k in ("forward", "train")]
            chunk = re.search(r"chunk(\d+)$", row["case"])
            place = chunk.group(1) if chunk else row["case"].split("-")[2]
            lines.setdefault((group(row), provider), {})[place] = " / ".join(both)
    if not rows:
        return ""
    places = sorted(
        {place for line in lines.values() for place in line},
        key=lambda place: int(place.split("x")[-1]),
    )
    text = stamp(rows, path) + f"| | {' | '.join(places)} |\n|{'---|' * (len(places) + 1)}\n"
    for (name, provider), line in lines.items():
        cells = " | ".join(line.get(place, "") for place in places)
        text += f"| {f'{name}: ' * bool(name)}{provider} | {cells} |\n"
    return text + notes(cases, form)


def tables(read_providers: Callable[[Path], Providers]) -> dict:
    """Returns table name -> (function of a result file, column that identifies such files)."""
    shape = lambda row: " ".join(row["case"].split("-")[1:3])
    return {
        "tfla-marks": (lambda path: marks(path, read_providers(path)), "limit_ms"),
        "tfla-chunks": (
            lambda path: sweep(path, read_providers(path), "chunks", shape),
            "limit_ms",
        ),
        "tfla-heads": (
            lambda path: sweep(path, read_providers(path), "heads", lambda _: ""),
            "limit_ms",
        ),
    }
