"""Trains PyTorch Geometric modules that are built on torch.nn's recurrent ones, on random graphs."""

import torch
from recording import STEPS, fit, record
from torch import nn
from torch_geometric import nn as geometric

WIDTH, NODES, GRAPHS = 16, 12, 4


class Graphs(nn.Module):
    """Predicts a number for each graph: convolutions over its edges, then a sum over its nodes."""

    def __init__(self, convolutions, jump=None, readout=None, width=WIDTH):
        super().__init__()
        self.convolutions = nn.ModuleList(convolutions)
        self.jump, self.readout = jump, readout or geometric.SumAggregation()
        self.out = nn.Linear(width, 1)

    def forward(self, x, edges, graph):
        layers = []
        for convolution in self.convolutions:
            x = convolution(x, edges).tanh()
            layers.append(x)
        x = x if self.jump is None else self.jump(layers)
        return self.out(self.readout(x, graph, dim_size=GRAPHS))


class Molecules(nn.Module):
    def __init__(self):
        super().__init__()
        sizes = {"hidden_channels": WIDTH, "out_channels": 1, "edge_dim": 3}
        self.model = geometric.AttentiveFP(WIDTH, **sizes, num_layers=3, num_timesteps=2)

    def forward(self, x, edges, graph):
        return self.model(x, edges, torch.ones(edges.shape[1], 3), graph)


def sage(aggregation="mean"):
    return geometric.SAGEConv(WIDTH, WIDTH, aggr=aggregation)


MODELS = {
    "lstm_aggregation": lambda: Graphs([sage("lstm"), sage("lstm")]),
    "gru_aggregation": lambda: Graphs([sage()], readout=geometric.GRUAggregation(WIDTH, WIDTH)),
    "jumping_knowledge": lambda: Graphs(
        [sage(), sage(), sage()], jump=geometric.JumpingKnowledge("lstm", WIDTH, 3)
    ),
    "gated_graph_conv": lambda: Graphs([geometric.GatedGraphConv(WIDTH, num_layers=3)]),
    "set2set": lambda: Graphs([sage()], readout=geometric.Set2Set(WIDTH, 3), width=2 * WIDTH),
    "attentive_fp": Molecules,
}


def train(flashcell, name):
    model = MODELS[name]()
    flashcell.replace(model)
    graph = torch.arange(GRAPHS).repeat_interleave(NODES)

    def loss():
        x = torch.randn(GRAPHS * NODES, WIDTH)
        ends = torch.randint(NODES, (2, GRAPHS, 3 * NODES)) + NODES * torch.arange(GRAPHS)[:, None]
        source, target = ends.flatten(1)
        order = target.argsort(stable=True)  # the order that the LSTM aggregation requires
        edges = torch.stack([source[order], target[order]])
        wanted = x.new_zeros(GRAPHS, 1).index_add(0, graph, x[:, :1])
        return nn.functional.mse_loss(model(x, edges, graph), wanted)

    return fit(model, [loss] * STEPS)


if __name__ == "__main__":
    record(train, tuple(MODELS))
