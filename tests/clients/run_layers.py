"""Runs models that put torch.nn's recurrent layers between others: speechbrain's CRDNN and decoder,
Demucs, and PyTorch Geometric's aggregations."""

import torch
from comparing import compare

BATCH, TIME, WIDTH = 8, 200, 128


def speechbrain(name):
    import train_speechbrain as speech
    from speechbrain.lobes.models.CRDNN import CRDNN

    x = torch.randn(BATCH, TIME, WIDTH)
    if name == "CRDNN":
        model = CRDNN(
            input_shape=[None, None, WIDTH], cnn_blocks=1, cnn_channels=[16], dropout=0.0,
            rnn_class=speech.recurrent.LSTM, rnn_layers=2, rnn_neurons=WIDTH, dnn_neurons=WIDTH,
        )  # fmt: skip
        return model, lambda model: model(x)
    model = speech.recurrent.AttentionalRNNDecoder(
        "gru", "location", num_layers=2, channels=4, kernel_size=5, scaling=1.0, hidden_size=WIDTH,
        attn_dim=WIDTH, enc_dim=WIDTH, input_size=WIDTH,
    )  # fmt: skip
    lengths = torch.linspace(0.3, 1, BATCH)
    return model, lambda model: model(x[:, :40], x, lengths)[0]


def demucs():
    from demucs.demucs import Demucs

    model = Demucs(["voice", "rest"], channels=16, depth=4, lstm_layers=2, dconv_lstm=2)
    sound = 0.1 * torch.randn(2, 2, 44100)
    return model, lambda model: model(sound)


def geometric(kind):
    from torch_geometric import nn as graphs

    nodes, degree = 1000, 12
    x = torch.randn(nodes, WIDTH)
    if kind == "aggregation":
        model = graphs.SAGEConv(WIDTH, WIDTH, aggr="lstm")
        edges = torch.stack([
            torch.randint(nodes, (nodes * degree,)), torch.arange(nodes).repeat_interleave(degree)
        ])  # fmt: skip
        return model, lambda model: model(x, edges)
    model = graphs.Set2Set(WIDTH, 6)
    graph = torch.arange(40).repeat_interleave(nodes // 40)
    return model, lambda model: model(x, graph)


MODELS = {
    "speechbrain CRDNN": lambda: speechbrain("CRDNN"),
    "speechbrain decoder": lambda: speechbrain("decoder"),
    "Demucs": demucs,
    "PyG LSTM aggregation": lambda: geometric("aggregation"),
    "PyG Set2Set": lambda: geometric("set2set"),
}

if __name__ == "__main__":
    compare(MODELS)
