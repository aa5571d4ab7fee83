"""Makes the tables of decoding, prefill and serving from scripts/results."""

from functools import partial
from pathlib import Path

from report.tables_training import Row, read, stamp

TARGETS = {("flash_mlstm_7b", 1): 240, ("flash_mlstm_7b", 8): 1600, ("flash_mlstm_7b", 64): 6500}
TARGETS |= {(f"flash_mlstm_7b, {kept}", 1): 430 for kept in ("int8", "int4")}
NARROW = "int8", "fp8", "int4"  # dtypes of weights that are a part of a model's name here
PREFILL_TARGETS = {("flash_mlstm_7b", 32768): 0.7}
ASKED_OF_SERVING = 3
MEASURED = {
    "flash_rnn": ("flash_gru_1b", "flash_lstm_1b", "lstm_165m"),
    "flash_mlstm": ("flash_mlstm_7b",),
    "flash_xlstm": ("flash_xlstm",),
}


def newest(path: Path, what: str, *keys: str) -> list[Row]:
    """Returns the newest row of every case, ordered by model and then by size."""
    cases: dict[tuple[str, ...], Row] = {}
    for row in read(path):
        if row["what"] == what:
            if row.get("dtype") in NARROW:
                row = {**row, "model": f"{row['model']}, {row['dtype']}"}
            cases[tuple(row[key] for key in keys)] = row
    models = list(dict.fromkeys(row["model"] for row in cases.values()))
    size = lambda row: [int(row[key]) for key in keys if row[key].isdigit()]
    return sorted(cases.values(), key=lambda row: (models.index(row["model"]), size(row)))


def marked(value: str, met: bool) -> str:
    return value if met else f"**{value}**"


def decode_table(path: Path) -> str:
    rows = newest(path, "decode", "model", "batch")
    text = stamp(path, rows) + (
        "| model | rows | tokens/s | target | ms a token | of them the step | the memory's floor | "
        "peak GiB |\n|---|---|---|---|---|---|---|---|\n"
    )
    for row in rows:
        target = TARGETS.get((row["model"], int(row["batch"])), 0)
        rate = marked(f"{float(row['tokens_per_s']):,.0f}", float(row["tokens_per_s"]) >= target)
        step = row["ms_step"] and f"{float(row['ms_step']):.3f}"
        text += (
            f"| {row['model']} | {row['batch']} | {rate} | {f'{target:,}' if target else ''} | "
            f"{float(row['ms_token']):.3f} | {step} | {float(row['floor_ms']):.3f} "
            f"({float(row['fraction']):.0%}) | {float(row['peak_gib']):.1f} |\n"
        )
    return text


def prefill_table(path: Path) -> str:
    rows = newest(path, "prefill", "model", "position")
    text = stamp(path, rows) + (
        "| model | tokens of the prompt | read in | of the products' rate | target | "
        "a token after it | peak GiB |\n|---|---|---|---|---|---|---|\n"
    )
    for row in rows:
        target = PREFILL_TARGETS.get((row["model"], int(row["position"])), 0)
        share = marked(f"{float(row['fraction']):.0%}", float(row["fraction"]) >= target)
        text += (
            f"| {row['model']} | {int(row['position']):,} | {float(row['ms_step']):,.0f} ms | {share} | "
            f"{f'{target:.0%}' if target else ''} | {float(row['ms_token']):.3f} ms | "
            f"{float(row['peak_gib']):.1f} |\n"
        )
    return text


def serving_table(path: Path) -> str:
    keys = "model", "dtype", "slots"
    ours = newest(path, "continuous", *keys)
    static = {tuple(r[k] for k in keys): r for r in newest(path, "static", *keys)}
    text = stamp(path, ours) + (
        "| model | requests, at a time | tokens/s | static batches', of requests | times as fast | target | "
        "peak MiB after a tenth, after all | static batches' |\n|---|---|---|---|---|---|---|---|\n"
    )
    for row in ours:
        peer = static[tuple(row[k] for k in keys)]
        times = float(row["times_static"])
        text += (
            f"| {row['model']}, {row['dtype']} | {row['requests']}, {row['slots']} | "
            f"{float(row['tokens_per_s']):,.0f} | "
            f"{float(peer['tokens_per_s']):,.0f}, of {peer['requests']} | "
            f"{marked(f'{times:.1f}', times >= ASKED_OF_SERVING)} | {ASKED_OF_SERVING} | "
            f"{float(row['early_peak_mib']):,.0f}, {float(row['peak_mib']):,.0f} | "
            f"{float(peer['peak_mib']):,.0f} |\n"
        )
    return text


def decode_cpu_table(path: Path) -> str:
    cases = {(r["model"], r["thread_count"], r["batch"]): r for r in read(path)}
    rows = list(cases.values())
    text = stamp(path, rows) + (
        "| model | threads | rows | ms a token | tokens/s | the reference's ms | times as fast | target |\n"
        "|---|---|---|---|---|---|---|---|\n"
    )
    for row in rows:
        ours, ratio = float(row["p50_ms"]), float(row["ratio"])
        text += (
            f"| {row['model']} | {row['thread_count']} | {row['batch']} | {ours:.3g} | "
            f"{int(row['batch']) / ours * 1e3:,.0f} | {float(row['reference_p50_ms']):.3g} | "
            f"{marked(f'{ratio:.1f}', ratio >= float(row['required']))} | {row['required']} |\n"
        )
    return text


def family_table(path: Path, models: tuple[str, ...]) -> str:
    """Makes a model card's table: decoding, and the longest prompt."""
    decoded = {(r["model"], r["batch"]): r for r in newest(path, "decode", "model", "batch")}
    prompts = {r["model"]: r for r in newest(path, "prefill", "model", "position")}
    models = tuple(model for model in models if (model, "1") in decoded)
    if not models:
        return ""
    text = stamp(path, [row for (model, _), row in decoded.items() if model in models]) + (
        "| model | tokens/s, 1 row | 8 | 64 | peak GiB | a prompt | read in |\n"
        "|---|---|---|---|---|---|---|\n"
    )
    for model in models:
        rows = [decoded[model, batch] for batch in ("1", "8", "64")]
        rates = " | ".join(f"{float(row['tokens_per_s']):,.0f}" for row in rows)
        prompt = prompts.get(model)
        read = prompt and f"{int(prompt['position']):,} | {float(prompt['ms_step']):,.0f} ms"
        peak = max(float(row["peak_gib"]) for row in rows)
        text += f"| {model} | {rates} | {peak:.1f} | {read or ' | '} |\n"
    return text


def accelerate_table(path: Path) -> str:
    rows = newest(path, "a token") + newest(path, "a prompt") + newest(path, "a training step")
    text = stamp(path, rows) + (
        "| of 4 blocks | tokens | transformers' own | accelerated | times as fast |\n"
        "|---|---|---|---|---|\n"
    )
    for row in rows:
        theirs, ours = float(row["theirs_ms"]), float(row["ours_ms"])
        text += (
            f"| {row['what']} | {int(row['tokens']):,} | {theirs:,.2f} ms | {ours:,.2f} ms | "
            f"{float(row['faster']):.1f} |\n"
        )
    return text


TABLES = {
    "decode-cpu": (decode_cpu_table, "reference_p50_ms"),
    **{f"{f}-decode": (partial(family_table, models=m), "ms_token") for f, m in MEASURED.items()},
    "accelerate": (accelerate_table, "theirs_ms"),
    "decode": (decode_table, "ms_token"),
    "prefill": (prefill_table, "ms_token"),
    "serving": (serving_table, "times_static"),
}
