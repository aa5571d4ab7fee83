"""Studies of bench_ops --suite pararnn: errors, residuals, chunk sizes, and time over length."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from flashcell.kernels import diagonal_rnn as reference
from measurement.record import Row

CELLS = reference.CELLS
# How weights are drawn, the scale of the inputs, and the bias of the forget gate: in which of these
# regimes are the three iterations of the published method enough?
REGIMES = {
    "initial": (lambda P, D: torch.randn(P, D) / D**0.5, 1.0, 0.0),
    "within .5": (lambda P, D: torch.rand(P, D) - 0.5, 1.0, 0.0),
    "within .5, wide gates": (lambda P, D: torch.rand(P, D) - 0.5, 3.0, 0.0),
    "within .9": (lambda P, D: 1.8 * torch.rand(P, D) - 0.9, 2.0, 0.0),
    "slow to forget": (lambda P, D: torch.rand(P, D) - 0.5, 1.0, -4.0),
    "unclipped": (lambda P, D: 2 * torch.randn(P, D), 1.0, 0.0),
}
COLUMNS = (
    "study",
    "op",
    "provider",
    "regime",
    "dtype",
    "B",
    "T",
    "D",
    "iteration",
    "chunk",
    "value",
)


def line(study: str, **values: Any) -> Row:
    row = dict.fromkeys(COLUMNS, "") | {"study": study} | values
    return {k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()}


def gru(h: torch.Tensor, x: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """One step of flash_gru in plain torch operations."""
    z, r = torch.sigmoid(a[0] * h + x[:, 0]), torch.sigmoid(a[1] * h + x[:, 1])
    c = torch.tanh(a[2] * (h * r) + x[:, 2])
    return (1 - z) * h + z * c


def rows_of(name: str, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (weight[:3], weight[3:]) if CELLS[name].weights > 3 else (weight,)


def errors(kernel: Any) -> list[Row]:
    """Measures the largest error of h against a float64 loop, for every method, dtype and weight
    regime."""
    rows, (B, T, D) = [], (4, 1024, 256)
    with torch.device("cuda"):
        for name, spec in CELLS.items():
            for regime, (draw, reach, bias) in REGIMES.items():
                torch.manual_seed(0)
                weight, wide = draw(spec.weights, D), reach * torch.randn(B, T, 3, D)
                wide[:, :, 0] += bias if name == "flash_gru" else -bias
                for dtype in (torch.float32, torch.bfloat16, torch.float16):
                    x, given = wide.to(dtype), rows_of(name, weight)
                    exact, _ = getattr(reference, name)(
                        x.double(), *(w.double() for w in given), method="sequential"
                    )
                    found = {}
                    last = "loop" if dtype == torch.float32 else "rounding"
                    for provider in ("sequential", "multiple_shooting", "newton", last):
                        if provider == "rounding":
                            h = exact.to(dtype)
                        elif provider == "loop":
                            h, _ = getattr(reference, name)(x, *given, method="sequential")
                        else:
                            h, _ = getattr(kernel, name)(x, *given, method=provider)
                        found[provider] = float((h.double() - exact).abs().max())
                    sizes = {"op": name, "regime": regime, "dtype": str(dtype)[6:]}
                    sizes |= {"B": B, "T": T, "D": D}
                    rows += [line("error", provider=s, value=v, **sizes) for s, v in found.items()]
                    shown = " ".join(f"{s} {v:.1e}" for s, v in found.items())
                    print(f"error {name} {regime} {str(dtype)[6:]}: {shown}", flush=True)
    return rows


def train(bound: float | None, steps: int = 400) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Trains a flash_gru to repeat the token of five steps ago; returns a, gates [B, L, 3, D],
    accuracy."""
    from flashcell import FlashGRU

    torch.manual_seed(0)
    V, D, B, L, back = 16, 64, 64, 100, 5
    embed, head = torch.nn.Embedding(V, D).cuda(), torch.nn.Linear(D, V).cuda()
    layer = FlashGRU(D, D, num_heads=4, max_recurrent=bound).cuda()
    everything = [*embed.parameters(), *head.parameters(), *layer.parameters()]
    optimizer = torch.optim.AdamW(everything, lr=1e-2)
    for _ in range(steps):
        tokens = torch.randint(0, V, (B, L), device="cuda")
        scores = head(layer(embed(tokens))[0])[:, back:].flatten(0, 1)
        wanted = tokens[:, :-back].flatten()
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(scores, wanted).backward()
        optimizer.step()
    right = float((scores.argmax(1) == wanted).float().mean())
    a = layer.a.detach()
    a = a if bound is None else a.clamp(-bound, bound)
    draw = torch.randint(0, V, (2, 2**13), device="cuda")
    return a, layer.in_proj(embed(draw)).detach(), right


def residuals(kernel: Any) -> list[Row]:
    """Measures the largest residual before each Newton iteration on all steps, over the length."""
    rows, D = [], 64
    with torch.device("cuda"):
        problems = {}
        for regime, (draw, reach, bias) in REGIMES.items():
            torch.manual_seed(0)
            x = reach * torch.randn(2, 2**13, 3, D)
            x[:, :, 0] += bias
            problems[regime] = (draw(3, D), x)
        for label, bound in (("trained within .5", 0.5), ("trained unclipped", None)):
            a, x, right = train(bound)
            print(f"residual {label}: accuracy {right:.3f}, largest |a| {a.abs().max():.2f}")
            problems[label] = (a, x)
        for regime, (a, x) in problems.items():
            for L in (2**7, 2**10, 2**13):
                _, _, info = kernel.solve(
                    gru, x[:, :L].contiguous(), params=(a,), state_shape=(D,), mode="scan",
                    structure="diagonal", bounds=(-1.0, 1.0), return_info=True,
                )  # fmt: skip
                sizes = {"op": "flash_gru", "provider": "solve-scan", "regime": regime}
                sizes |= {"dtype": "float32", "B": 2, "T": L, "D": D}
                for k, value in enumerate(info.residuals):
                    rows.append(line("residual", iteration=k, value=value, **sizes))
                rows.append(line("finished", value=float(info.finished), **sizes))
                shown = " ".join(f"{r:.0e}" for r in info.residuals[:8])
                print(f"residual {regime} L={L}: {shown} finished {info.finished}", flush=True)
    return rows


def milliseconds(call: Callable[[], Any], count: int = 5) -> float:
    """Returns the median ms of a few calls, host included: solve synchronises once per
    iteration."""
    call()
    taken = []
    for _ in range(count):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        taken.append((time.perf_counter() - start) * 1e3)
        if taken[0] > 500:
            break
    return statistics.median(taken)


def chunks(kernel: Any) -> list[Row]:
    """Measures time and iterations of solve with multiple shooting over the chunk size."""
    rows, (B, T, D) = [], (1, 4096, 256)
    with torch.device("cuda"):
        torch.manual_seed(0)
        for regime in ("within .5", "slow to forget"):
            draw, reach, bias = REGIMES[regime]
            a, x = draw(3, D), reach * torch.randn(B, T, 3, D)
            x[:, :, 0] += bias
            for chunk in (1, 4, 16, 64, 256):
                given = {"params": (a,), "state_shape": (D,), "structure": "diagonal"}
                call = lambda g=given, c=chunk, x=x: kernel.solve(
                    gru, x, **g, chunk=c, mode="scan", return_info=True
                )
                info, taken = call()[2], milliseconds(call, 3)
                sizes = {"op": "flash_gru", "provider": "solve-scan", "regime": regime}
                sizes |= {"dtype": "float32", "B": B, "T": T, "D": D, "chunk": chunk}
                rows.append(line("chunk-ms", value=taken, **sizes))
                rows.append(line("chunk-iterations", value=info.iterations, **sizes))
                print(
                    f"chunk {regime} C={chunk}: {taken:.2f} ms, {info.iterations} its", flush=True
                )
    return rows


POWERS = [*range(7, 20, 2), 20]  # powers of two: lengths for solve; the op also runs those between
# The sequential level takes 0.3 ms a step, 0.9 with the gradient: five minutes and fifteen at 2^20.
MODES = {
    "sequential": 2**11,
    "torch": 2**20,
    "scan": 2**20,
    "fused": 2**20,
    "fused_sequential": 2**20,
}


def lengths(kernel: Any) -> list[Row]:
    """Measures time over length for the published levels and the sequential method, with and
    without gradients."""
    rows, D = [], 256
    with torch.device("cuda"):
        torch.manual_seed(0)
        a, long = torch.rand(3, D) - 0.5, torch.randn(1, 2**20, 3, D)
        for mode, most in MODES.items():
            is_op = mode in ("fused", "fused_sequential")
            for power in range(7, 21) if is_op else POWERS:
                T = 2**power
                if most < T:
                    break
                x = long[:, :T].contiguous().requires_grad_()
                weight = a.clone().requires_grad_()

                def forward(x=x, weight=weight, mode=mode, is_op=is_op):
                    if is_op:
                        method = "auto" if mode == "fused" else "sequential"
                        return kernel.flash_gru(x, weight, method=method)[0]
                    given = {"params": (weight,), "state_shape": (D,), "structure": "diagonal"}
                    return kernel.solve(gru, x, mode=mode, **given)[0]

                both = lambda x=x, w=weight, f=forward: torch.autograd.grad(f().sum(), (x, w))
                sizes = {
                    "op": "flash_gru",
                    "provider": mode,
                    "dtype": "float32",
                    "B": 1,
                    "T": T,
                    "D": D,
                }
                with torch.no_grad():
                    once = milliseconds(forward)
                twice = milliseconds(both, 3)
                rows.append(line("length-forward-ms", value=once, **sizes))
                rows.append(line("length-train-ms", value=twice, **sizes))
                print(f"length {mode} T={T}: {once:.3f} ms, with gradient {twice:.3f}", flush=True)
    return rows


STUDIES = {"errors": errors, "residuals": residuals, "chunks": chunks, "lengths": lengths}
