"""Trains SpeechBrain's recurrent modules with lengths, its CRDNN and its attentional decoder."""

import importlib.machinery
import sys
import types

import torch
from recording import STEPS, fit, record
from torch import nn

try:
    import torchaudio  # noqa: F401
except (ImportError, OSError):
    # torchaudio's wheel loads only beside torch for CUDA. SpeechBrain imports it for parts not used
    # here.
    stub = types.ModuleType("torchaudio")
    stub.__spec__, stub.__version__ = importlib.machinery.ModuleSpec("torchaudio", None), "2.9.0"
    sys.modules["torchaudio"] = stub

from speechbrain.lobes.models.CRDNN import CRDNN
from speechbrain.nnet import RNN as recurrent

WIDTH, BATCH, TIME = 16, 6, 14
LENGTHS = torch.tensor([1.0, 0.9, 0.9, 0.6, 0.5, 0.2])  # as shares of the longest


class Sequences(nn.Module):
    """Runs a module of `recurrent`, with lengths if it takes them."""

    def __init__(self, kind, **options):
        super().__init__()
        self.cells = kind.endswith("Cell")
        options |= {"num_layers": 2} if self.cells else {"num_layers": 2, "bidirectional": True}
        shape = [BATCH, WIDTH] if self.cells else [BATCH, TIME, WIDTH]
        self.model = getattr(recurrent, kind)(WIDTH, input_shape=shape, **options)
        self.out = nn.Linear(WIDTH if self.cells else 2 * WIDTH, WIDTH)

    def forward(self, x):
        if not self.cells:
            return self.out(self.model(x, lengths=LENGTHS)[0])
        outputs, state = [], None
        for step in x.unbind(1):
            output, state = self.model(step, state)
            outputs.append(output)
        return self.out(torch.stack(outputs, 1))


class Convolutions(nn.Module):
    """Runs convolutions, recurrent layers and a linear network."""

    def __init__(self):
        super().__init__()
        self.model = CRDNN(
            input_shape=[None, None, WIDTH],
            dropout=0.0,  # flashcell's dropout draws other random numbers
            cnn_blocks=1,
            cnn_channels=[4],
            time_pooling=False,
            rnn_class=recurrent.LSTM,
            rnn_layers=2,
            rnn_neurons=WIDTH,
            rnn_bidirectional=True,
            dnn_blocks=1,
            dnn_neurons=WIDTH,
        )

    def forward(self, x):
        return self.model(x)


class Decoder(nn.Module):
    def __init__(self, kind):
        super().__init__()
        sizes = {"hidden_size": WIDTH, "attn_dim": WIDTH, "enc_dim": WIDTH, "input_size": WIDTH}
        self.model = recurrent.AttentionalRNNDecoder(
            kind, "location", num_layers=2, channels=4, kernel_size=5, scaling=1.0, **sizes
        )

    def forward(self, x):
        return self.model(x.flip(1), x, LENGTHS)[0]


MODELS = {
    "RNN": lambda: Sequences("RNN", nonlinearity="relu"),
    "LSTM": lambda: Sequences("LSTM"),
    "GRU": lambda: Sequences("GRU"),
    "RNNCell": lambda: Sequences("RNNCell"),
    "LSTMCell": lambda: Sequences("LSTMCell"),
    "GRUCell": lambda: Sequences("GRUCell"),
    "CRDNN": Convolutions,
    "decoder": lambda: Decoder("gru"),
}


def train(flashcell, name):
    model = MODELS[name]()
    flashcell.replace(model)

    def loss():
        x = torch.randn(BATCH, TIME, WIDTH)
        return nn.functional.mse_loss(model(x), x.cumsum(1))

    return fit(model, [loss] * STEPS)


if __name__ == "__main__":
    record(train, tuple(MODELS))
