"""Puts other libraries' cells into our models, for bench_models --training CASE --peers.

Everything around it, the weights and their optimizer stay, and so does autocast.

    nn.LSTM        torch.nn's, cuDNN: a block's whole mixer, for cells "lstm" of one head
    flashrnn       its fused kernels (PyPI), which it compiles at the first call, for minutes, with
                   what scripts/bench/suites/fused_rnn/flashrnn_peer.py mends
    mlstm_kernels  its chunkwise Triton kernels (PyPI), chunks of 128; norm and output gate by torch
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.suites.fused_rnn import flashrnn_peer
from bench.suites.fused_rnn.providers_cuda import Unavailable
from flashcell.layers.mlstm import split_heads
from flashcell.layers.recurrent_mixer import RecurrentMixer
from loss_curves.studies import TorchMixer


class FlashRNNMixer(nn.Module):
    """A RecurrentMixer whose cell is flashrnn's: x [T, B, N, D, G], R [N, D, G, D], h [T, B, N,
    D]."""

    def __init__(self, mixer: RecurrentMixer, rows: int, backend: str = "cuda_fused"):
        super().__init__()
        self.in_proj, self.call = mixer.in_proj, flashrnn_peer.flashrnn().flashrnn
        self.recurrent_weight, self.gate_bias = mixer.recurrent_weight, mixer.gate_bias
        kind = "bfloat16" if backend == "cuda_fused" else "float32"
        heads, width = mixer.gate_bias.shape[1:]
        self.config = flashrnn_peer.config((mixer.cell, heads, width, rows), kind, backend)
        self.dtype = getattr(torch, kind)

    def forward(self, hidden_states: Tensor, *_: Any) -> Tensor:  # [B, T, H]
        w = self.recurrent_weight.permute(1, 2, 0, 3).to(self.dtype)
        bias = self.gate_bias.permute(1, 2, 0).to(self.dtype)
        x = self.in_proj(hidden_states).unflatten(-1, self.recurrent_weight.shape[:3])
        x = x.permute(1, 0, 3, 4, 2).to(self.dtype)
        states, _ = self.call(x.contiguous(), w.contiguous(), bias.contiguous(), config=self.config)
        return states[0].transpose(0, 1).flatten(2)


def nn_lstm(model: nn.Module, rows: int) -> None:
    if getattr(model.config, "cell", "") != "lstm" or model.config.num_heads != 1:
        raise Unavailable("nn.LSTM has one head")
    for block in model.model.layers:
        device = block.mixer.gate_bias.device
        block.mixer = TorchMixer(
            block.mixer, both_biases=True, own_start=False, own_kernel=False
        ).to(device)


def flashrnn(model: nn.Module, rows: int, backend: str = "cuda_fused") -> None:
    if getattr(model.config, "cell", "") not in flashrnn_peer.CELLS:
        raise Unavailable("flashrnn is compared for lstm and slstm")
    for block in model.model.layers:
        block.mixer = FlashRNNMixer(block.mixer, rows, backend)


def mlstm_kernels(model: nn.Module, rows: int, kernel: str | None = None) -> None:
    if model.config.model_type != "flash_mlstm":
        raise Unavailable("mlstm_kernels has the mLSTM alone")
    try:
        from mlstm_kernels.torch import get_mlstm_kernel
    except ImportError as error:
        raise Unavailable(f"mlstm_kernels cannot be imported: {error}") from None
    sigmoid = model.config.input_gate == "sigmoid"
    run = get_mlstm_kernel(kernel or f"chunkwise--triton_xl_chunk{'_siging' * sigmoid}")
    options = {"chunk_size": 128, "eps": 0.0} | ({"normalize": False} if sigmoid else {})
    for block in model.backbone.blocks:
        mixer = block.mlstm_layer

        def mix(operands: list[Tensor], cache: Any, boundaries: Any, mixer=mixer) -> Tensor:
            config, norm = mixer.config, mixer.multihead_norm
            q, k, v, o = (split_heads(x, config.num_heads) for x in operands[:4])
            gates = torch.bfloat16 if sigmoid else torch.float32  # as its Triton code needs
            i, f = (x.transpose(1, 2).to(gates).contiguous() for x in operands[4:])
            q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
            h = run(q, k, v, i, f, **options).transpose(1, 2)  # [B, T, N, D]
            scale = F.layer_norm if norm.kind == "layer" else F.rms_norm
            h = scale(h.float(), h.shape[-1:], eps=norm.eps) * norm().float()
            return (h * torch.sigmoid(o)).to(o.dtype).flatten(-2)

        mixer.mix = mix


PEERS: dict[str, Callable[[nn.Module, int], None]] = {
    "nn.LSTM": nn_lstm, "flashrnn": flashrnn, "mlstm_kernels": mlstm_kernels,
}  # fmt: skip
