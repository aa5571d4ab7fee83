"""Makes the tables of diagonal-rnn's notebook from the rows of bench_ops --suite pararnn."""

import csv
from collections.abc import Callable
from pathlib import Path

SHORT = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
Row = dict[str, str]
Providers = dict[str, dict[str, dict[str, Row]]]  # case -> provider -> pass -> row


def stamp(rows: list[Row], path: Path) -> str:
    first = rows[0]
    commits = ", ".join(sorted({f"{row['commit']} of {row['date']}" for row in rows}))
    return (
        f"{first['device']}, driver {first['driver']}, torch {first['torch']}, commit {commits} "
        f"(all columns: `scripts/results/{path.name}`):\n\n"
    )


def size_of(row: Row) -> str:
    return f"{row['B']}×{row['T']}×{row['D']}"


def shown(ms: str | float) -> str:
    ms = float(ms)
    return f"{ms:.3g} ms" if ms >= 0.1 else f"{ms * 1e3:.3g} us"


def peers_of(providers: dict[str, dict[str, Row]], which: str, names: tuple[str, ...]) -> str:
    there = [name for name in names if which in providers.get(name, {})]
    return ", ".join(f"{name} {shown(providers[name][which]['p50_ms'])}" for name in there)


def marks(path: Path, cases: Providers) -> str:
    """Makes the table of targets: floor, time, limit, and peers."""
    rows = [
        (providers, row)
        for providers in cases.values()
        for row in providers.get("ours", {}).values()
        if row["limit_ms"] or (row["op"] == "linear_scan")
    ]
    if not rows:
        return ""
    text = stamp([row for _, row in rows], path)
    text += f"| op, B×T×D | dtype | pass | floor | plain | time | limit | peers |\n|{'---|' * 8}\n"
    for providers, row in rows:
        name = row["op"] + (" layer" if row["form"] == "layer" else "")
        limit = row["limit_ms"]
        if limit and float(row["p50_ms"]) > float(limit):
            limit = f"**{limit}**"
        peers = peers_of(providers, row["pass"], ("pararnn-torch", "accelerated-scan"))
        text += f"| {name} {size_of(row)} | {SHORT[row['dtype']]} | {row['pass']} "
        plain = providers.get("plain", {}).get(row["pass"])
        text += f"| {shown(row['floor_ms'])} | {shown(plain['p50_ms']) if plain else ''} "
        text += f"| {shown(row['p50_ms'])} | {limit} | {peers} |\n"
    return text


def sweep(path: Path, cases: Providers) -> str:
    """Makes the table of every method over channels and lengths: fp32 forward, by graph replay."""
    names = ("ours", "sequential", "multiple_shooting", "newton", "pararnn-torch")
    rows = [
        (providers, providers["ours"]["forward"])
        for providers in cases.values()
        if "multiple_shooting" in providers and "forward" in providers.get("ours", {})
    ]
    if not rows:
        return ""
    rows.sort(key=lambda pair: (pair[1]["op"], int(pair[1]["T"]), int(pair[1]["D"])))
    text = f"| op, B×T×D | floor | auto | {' | '.join(names[1:])} |\n|{'---|' * 7}\n"
    for providers, row in rows:
        times = [providers.get(name, {}).get("forward") for name in names]
        cells = [shown(t["p50_ms"]) if t else "" for t in times]
        text += f"| {row['op']} {size_of(row)} | {shown(row['floor_ms'])} | {' | '.join(cells)} |\n"
    return text


def studies(path: Path, wanted: str) -> list[Row]:
    with path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["study"] == wanted]
    newest = (rows[-1]["date"], rows[-1]["commit"]) if rows else None
    return [row for row in rows if (row["date"], row["commit"]) == newest]


def errors(path: Path) -> str:
    """Makes the table of the largest error of h against float64, for each weight regime."""
    rows = studies(path, "error")
    if not rows:
        return ""
    providers = ("sequential", "multiple_shooting", "newton")
    text = (
        stamp(rows, path)
        + "| cell, weights | dtype | sequential | multiple_shooting | newton | for comparison |\n"
    )
    text += "|---|---|---|---|---|---|\n"
    for key in dict.fromkeys((r["op"], r["regime"], r["dtype"]) for r in rows):
        found = {
            r["provider"]: float(r["value"])
            for r in rows
            if (r["op"], r["regime"], r["dtype"]) == key
        }
        rest = ", ".join(f"{s} {v:.1e}" for s, v in found.items() if s not in providers)
        values = " | ".join(f"{found[s]:.1e}" for s in providers)
        text += f"| {key[0]}, {key[1]} | {SHORT[key[2]]} | {values} | {rest} |\n"
    return text


def residuals(path: Path) -> str:
    """Makes the table of the largest residual before each Newton iteration, over the length."""
    rows = studies(path, "residual")
    finished = {(r["regime"], r["T"]): int(float(r["value"])) for r in studies(path, "finished")}
    text = "| weights | T | residual before iteration 1, 2, ... | steps finished one by one |\n"
    text += "|---|---|---|---|\n"
    for key in dict.fromkeys((r["regime"], r["T"]) for r in rows):
        values = [float(r["value"]) for r in rows if (r["regime"], r["T"]) == key]
        line = ", ".join(f"{v:.0e}" for v in values[:6]) + (", ..." if len(values) > 6 else "")
        text += f"| {key[0]} | {key[1]} | {line} | {finished[key]} |\n"
    return text if rows else ""


def tables(read_providers: Callable[[Path], Providers]) -> dict:
    """Returns table name -> (function of a result file, column that identifies such files)."""
    return {
        "diagonal-marks": (lambda path: marks(path, read_providers(path)), "limit_ms"),
        "diagonal-sweep": (lambda path: sweep(path, read_providers(path)), "limit_ms"),
        "diagonal-errors": (errors, "study"),
        "diagonal-residuals": (residuals, "study"),
    }
