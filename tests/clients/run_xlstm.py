"""Runs the models of the package xlstm: block stacks of its sLSTM and mLSTM, and xLSTMLarge."""

from functools import partial

import torch
from comparing import compare
from xlstm import (
    FeedForwardConfig,
    mLSTMBlockConfig,
    mLSTMLayerConfig,
    sLSTMBlockConfig,
    sLSTMLayerConfig,
    xLSTMBlockStack,
    xLSTMBlockStackConfig,
)
from xlstm.xlstm_large.model import xLSTMLarge, xLSTMLargeConfig

BLOCKS = {"sLSTM and mLSTM": [1, 3], "sLSTM": "all", "mLSTM": []}
WIDTH, TIME = 128, 200


def build(name, device):
    if name == "xLSTMLarge":
        config = xLSTMLargeConfig(
            embedding_dim=256, num_heads=4, num_blocks=3, vocab_size=400, return_last_states=True,
            chunkwise_kernel="chunkwise--native_autograd", sequence_kernel="native_sequence__native",
            step_kernel="native", mode="train", chunk_size=40,
        )  # fmt: skip
        tokens = torch.randint(400, (4, TIME))
        return shake(xLSTMLarge(config)), lambda model: model(tokens.to(device_of(model)))[0]
    backend = "cuda" if device == "cuda" else "vanilla"
    slstm = sLSTMLayerConfig(backend=backend, num_heads=4, conv1d_kernel_size=4)
    config = xLSTMBlockStackConfig(
        mlstm_block=mLSTMBlockConfig(mlstm=mLSTMLayerConfig(conv1d_kernel_size=4, num_heads=4)),
        slstm_block=sLSTMBlockConfig(slstm=slstm, feedforward=FeedForwardConfig()),
        context_length=256, num_blocks=4, embedding_dim=WIDTH, slstm_at=BLOCKS[name],
    )  # fmt: skip
    x = torch.randn(4, TIME, WIDTH)
    return shake(xLSTMBlockStack(config)), lambda model: model(x.to(device_of(model)))


def shake(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def device_of(model):
    return next(model.parameters()).device


if __name__ == "__main__":
    compare({name: partial(build, name) for name in (*BLOCKS, "xLSTMLarge")}, by_device=True)
