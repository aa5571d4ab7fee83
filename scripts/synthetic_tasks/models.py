"""The models of the synthetic tasks: one layer of each kind, as arXiv 2510.21450, appendix C.2, has it.

    embedding [V, 64] -> (+ positions) -> norm -> mixer -> norm -> linear [64, V], 4 heads, no residual

Recurrent mixers are flashcell's own, the Transformer and Mamba2 are made of transformers' parts.
"""

import math
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import GPT2Config, LlamaConfig, Mamba2Config
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP, GPT2Attention
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

from flashcell import FlashGRU, FlashLSTM, FlashMLSTMConfig, FlashRNNConfig
from flashcell.layers.diagonal_mixer import DiagonalMixer
from flashcell.layers.mlstm import GateLinear
from flashcell.layers.recurrent_mixer import RecurrentMixer
from flashcell.modeling_flash_mlstm import FlashMLSTMMixer
from synthetic_tasks.data import Task
from synthetic_tasks.results import NAMES

WIDTH, HEADS, EPS = 64, 4, 1e-5
DENSE = ("rnn", "gru", "lstm", "slstm")
DIAGONAL: dict[str, Any] = {"flash_gru": FlashGRU, "flash_lstm": FlashLSTM}


class TaskModel(nn.Module):
    """The one-layer model: tokens [B, T] -> logits [B, T, V]; weights depend on the seed alone."""

    def __init__(self, task: Task, name: str, seed: int, backend: str = "auto"):
        if name not in NAMES:
            raise ValueError(f"model is {name!r}, but must be one of {', '.join(NAMES)}")
        super().__init__()
        norms = task.norms or name == "transformer"
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.embed = nn.Embedding(task.vocabulary, WIDTH)
            self.in_norm = nn.RMSNorm(WIDTH, EPS) if norms else nn.Identity()
            self.mixer = make_mixer(task, name, backend)
            self.out_norm = nn.RMSNorm(WIDTH, EPS) if norms else nn.Identity()
            # the Transformer's published counts are those with a bias here, and no others
            self.head = nn.Linear(WIDTH, task.vocabulary, bias=isinstance(self.mixer, Published))
        longest = max(task.lengths[1], task.test_lengths[1]) if task.positions else 0
        self.register_buffer("positions", sinusoids(longest), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        if len(self.positions):
            x = x + self.positions[: x.shape[1]]
        x = self.mixer(self.in_norm(x))
        return self.head(self.out_norm(x[0] if isinstance(x, tuple) else x))


def make_mixer(task: Task, name: str, backend: str) -> nn.Module:
    """Makes a mixer: [B, T, 64] -> [B, T, 64], or a tuple whose first entry that is."""
    sizes: dict[str, Any] = {"hidden_size": WIDTH, "num_heads": HEADS, "num_hidden_layers": 1}
    if name in DENSE:
        recurrent = RecurrentMixer(FlashRNNConfig(cell=name, backend=backend, **sizes), 0)
        recurrent.init_weights()
        return recurrent
    if name in DIAGONAL and not task.full_block:
        bound = task.max_recurrent
        cell = DIAGONAL[name](WIDTH, WIDTH, HEADS, max_recurrent=bound, backend=backend)
        if task.memory:
            hold(cell, task.memory)
        return cell
    if name in DIAGONAL:
        bound = {"max_recurrent": task.max_recurrent, "norm_eps": EPS}
        return DiagonalMixer(FlashRNNConfig(cell=name, backend=backend, **bound, **sizes))
    if name == "mlstm":
        mlstm = FlashMLSTMMixer(FlashMLSTMConfig(backend=backend, **sizes))
        for module in mlstm.modules():
            if isinstance(module, GateLinear):
                module.init_weights()
        return mlstm
    if name == "mamba2":  # Mamba2 always has a convolution and a gate
        inner = {"expand": 1, "head_dim": WIDTH // HEADS, "state_size": 64, "n_groups": 1}
        return Mamba2Mixer(Mamba2Config(conv_kernel=4, chunk_size=32, **inner, **sizes), 0)
    longer = task.test_lengths[1] > task.lengths[1]
    return Extrapolating() if longer else Published(task)


@torch.no_grad()
def hold(cell: FlashGRU | FlashLSTM, steps: int) -> None:
    """Sets the biases of the update gate by chrono initialisation (arXiv 1804.11188).

    A channel forgets 1 / (1 + n) of its state per step, n uniform in 1 to `steps`."""
    bias = torch.empty(cell.hidden_size).uniform_(1, steps).log()
    # Opens FlashLSTM's gate f or closes FlashGRU's z: either keeps the state.
    cell.in_proj.bias[0] = bias if isinstance(cell, FlashLSTM) else -bias


def unfused() -> AbstractContextManager:
    """Selects attention by matrix products: fused kernels refuse the strides of stacked models."""
    return sdpa_kernel(SDPBackend.MATH)


class Published(nn.Module):
    """A Transformer layer with the published number of parameters, 31,552 + (2 * 64 + 1) V.

    It has positions, attention with biases, and an MLP 64 -> 64 -> 64 with biases after a norm. The
    paper (ParaRNN) states only the counts, 48.1k, 31.8k, 32.8k, 32.2k for V = 128, 2, 10, 5, not the parts."""

    def __init__(self, task: Task):
        super().__init__()
        config = GPT2Config(n_embd=WIDTH, n_head=HEADS, n_layer=1, attn_pdrop=0.0, resid_pdrop=0.0)
        config._attn_implementation = "sdpa"
        self.positions = nn.Parameter(0.02 * torch.randn(task.lengths[1], WIDTH))
        self.attention = GPT2Attention(config, layer_idx=0)
        self.norm = nn.RMSNorm(WIDTH, EPS)
        self.mlp = GPT2MLP(WIDTH, config)
        for name, parameter in self.named_parameters():
            if "c_" in name:  # GPT-2's: normal weights, zero biases
                nn.init.normal_(parameter, std=0.02 if name.endswith("weight") else 0.0)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.positions[: x.shape[1]]
        with unfused():
            x = x + self.attention(x)[0]
        return x + self.mlp(self.norm(x))


class Extrapolating(nn.Module):
    """A Llama layer: its rotary positions (RoPE) are defined at lengths that training did not have."""

    def __init__(self) -> None:
        super().__init__()
        sizes: dict[str, Any] = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH}
        config = LlamaConfig(**sizes, num_attention_heads=HEADS, num_hidden_layers=1)
        config._attn_implementation = "sdpa"
        self.rotary, self.layer = LlamaRotaryEmbedding(config), LlamaDecoderLayer(config, 0)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device)[None]
        with unfused():
            out = self.layer(x, position_embeddings=self.rotary(x, places))
        return out[0] if isinstance(out, tuple) else out


def sinusoids(length: int) -> Tensor:
    """Returns sinusoidal position embeddings [length, 64] (arXiv 1706.03762, section 3.5)."""
    rate = torch.exp(torch.arange(0, WIDTH, 2) * (-math.log(10_000.0) / WIDTH))
    angle = torch.arange(length)[:, None] * rate
    return torch.stack([angle.sin(), angle.cos()], -1).flatten(1)


def count_parameters(task: Task, name: str) -> int:
    return sum(p.numel() for p in TaskModel(task, name, 0).parameters())
