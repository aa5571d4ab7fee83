"""Forecasts with TiRex (tirex-ts), at the sizes of its published model: 35 M parameters."""

from functools import partial

import torch
from comparing import compare
from tirex.models.tirex import TiRexZero

SIZES = {"TiRex, 1 series": 1, "TiRex, 16 series": 16, "TiRex, 64 series": 64}
CONFIG = {
    "input_patch_size": 32,
    "output_patch_size": 32,
    "quantiles": [0.1 * k for k in range(1, 10)],
    "block_kwargs": {"embedding_dim": 512, "num_heads": 4, "num_blocks": 12},
    "input_ff_dim": 2048,
}


def build(name, device):
    model = TiRexZero("cuda" if device == "cuda" else "torch", CONFIG, train_ctx_len=2048)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.04)
    context = torch.randn(SIZES[name], 2016).cumsum(1)

    def run(model):
        device = next(model.parameters()).device
        return model._forecast_tensor(context.to(device), prediction_length=64)

    return model, run


if __name__ == "__main__":
    compare({name: partial(build, name) for name in SIZES}, train=("cpu",), by_device=True)
