"""plot_bench: how many times faster than the fastest peer, a few cases as a table and as bars."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

Row = dict[str, str]
Providers = dict[str, dict[str, Row]]  # a case's rows: provider -> pass -> row
ReadSides = Callable[..., dict[str, Providers]]

CASES = [  # (what, kernel, case, pass)
    ("nn.LSTM, 4 layers of 768", "fused_rnn", "lstm-1x768-module-layers4", "train"),
    ("nn.LSTM, bidirectional, 768", "fused_rnn", "lstm-1x768-module-bidirectional", "train"),
    ("GRU with projection, 768", "fused_rnn", "gru-1x768-linear", "train"),
    ("LSTM with projection, 768", "fused_rnn", "lstm-1x768-linear", "train"),
    ("LSTM with projection, 768", "fused_rnn", "lstm-1x768-b1-linear-step", "step"),
    ("LSTM, 12 heads of 64", "fused_rnn", "lstm-12x64", "train"),
    ("sLSTM, 12 heads of 64", "fused_rnn", "slstm-12x64", "train"),
    ("mLSTM, 8 heads of 512", "tfla", "mlstm-exp-8x256x512-B8T8192", "train"),
    ("mLSTM, 64 heads of 64", "tfla", "mlstm-exp-64x64x64-B4T8192", "train"),
    ("linear scan, 4,096 channels", "diagonal_rnn", "linear_scan-op-8x2048x4096-bf16", "forward"),
]
PASSES = {"train": "forward + backward", "forward": "forward", "step": "one step"}
PEERS = {
    "cudnn-fp16": "cuDNN in fp16",
    "cudnn-bf16": "cuDNN in bf16",
    "flashrnn": "FlashRNN",
    "mamba2": "Mamba2",
    "simple_gla": "simple GLA (fla)",
}
NO_PEERS = ("ours", "sdpa", "plain")  # attention and a copy of as many bytes are no peers

ROW, LEFT, WIDTH, TOP, UNIT = 24, 250, 760, 44, 27  # in pixels; UNIT is a ratio of 1
GAIN, LOSS = "#2f6db3", "#c0392b"


class Speedup(NamedTuple):
    what: str
    batch: str
    steps: str
    which: str
    ms: float
    peer: str
    ratio: float  # how many times longer the fastest peer takes
    row: Row


def speedups(path: Path, read_providers: ReadSides) -> Iterator[Speedup]:
    for what, kernel, case, which in CASES:
        providers = read_providers(path, kernel).get(case)
        if providers is None or which not in providers["ours"]:
            continue
        row = providers["ours"][which]
        ratio, peer = min(
            (float(passes[which]["ratio"]), name)
            for name, passes in providers.items()
            if which in passes and name not in NO_PEERS
        )
        name = PEERS.get(peer, peer)
        yield Speedup(
            what, row["B"], row["T"], PASSES[which], float(row["p50_ms"]), name, ratio, row
        )


def speedup_table(path: Path, read_providers: ReadSides) -> str:
    rows = list(speedups(path, read_providers))
    if not rows:
        return ""
    text = (
        "| what, bf16 | batch, steps | pass | time | fastest peer | times as fast |\n"
        "|---|---|---|---|---|---|\n"
    )
    for one in rows:
        time = f"{one.ms:.3g} ms" if one.ms >= 0.1 else f"{one.ms * 1e3:.3g} us"
        ratio = f"{one.ratio:.2f}" if one.ratio >= 1 else f"**{one.ratio:.2f}**"
        size = f"{one.batch}, {one.steps}"
        text += f"| {one.what} | {size} | {one.which} | {time} | {one.peer} | {ratio} |\n"
    return text


def speedup_figure(path: Path, read_providers: ReadSides) -> str:
    """The same as an SVG: bars to the right, a line where both are equally fast."""
    rows = list(speedups(path, read_providers))
    if not rows:
        return ""
    height = TOP + ROW * len(rows) + 12
    device = rows[0].row["device"]
    title = f"Times as fast as the fastest peer: forward + backward in bf16, {device}"
    text = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="12">\n'
        f"<title>{title}</title>\n"
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>\n'
        f'<text x="12" y="20" font-size="14" font-weight="bold" fill="#222222">{title}</text>\n'
        f'<text x="{LEFT + UNIT}" y="36" text-anchor="middle" fill="#555555">equal</text>\n'
    )
    for i, one in enumerate(rows):
        y, length = TOP + ROW * i, one.ratio * UNIT
        label = one.what if one.which == PASSES["train"] else f"{one.what}, {one.which}"
        text += (
            f'<text x="{LEFT - 8}" y="{y + 15}" text-anchor="end" fill="#222222">{label}</text>\n'
            f'<rect x="{LEFT}" y="{y + 3}" width="{length:.1f}" height="{ROW - 7}" '
            f'fill="{GAIN if one.ratio >= 1 else LOSS}"/>\n'
            f'<text x="{LEFT + max(length, UNIT) + 6:.1f}" y="{y + 15}" fill="#222222">'
            f"{one.ratio:.2f}x {one.peer}</text>\n"
        )
    x, bottom = LEFT + UNIT, TOP + ROW * len(rows)
    line = f'<line x1="{x}" y1="{TOP - 4}" x2="{x}" y2="{bottom}" stroke="#555555" '
    return text + line + 'stroke-dasharray="3 2"/>\n</svg>\n'
