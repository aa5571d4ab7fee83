"""Computes the FLOPs of a training step and the device's measured matrix-product rate."""

import time

import torch
from torch import nn


def flops_per_token(model: nn.Module) -> int:
    """Returns the FLOPs of a training step per token: two per weight forward, four backward.
    The embedding is looked up, which costs nothing, unless it is the head as well. What a cell, a
    scan or attention does without weights is not counted."""
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    weights = sum(p.numel() for p in model.parameters() if p is not table)
    return 6 * (weights + (head.numel() if head is table else 0))


@torch.no_grad()
def matmul_rate(device: torch.device, precision: str) -> float:
    """Measures the FLOP/s of this device on a square matrix product, the best of a few runs.

    It is the reference for "tokens/s"; the data sheet's number is reached by no product."""
    size, times = (8192, 10) if device.type == "cuda" else (768, 3)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        a = torch.randn(size, size, device=device, dtype=dtype)
    best = float("inf")
    for _ in range(times):
        started = time.perf_counter()
        product = a @ a
        product[0, 0].item()  # waits for the product
        best = min(best, time.perf_counter() - started)
    return 2 * size**3 / best
