"""Runs recurrent policies: TorchRL's LSTMModule and GRUModule, and sb3-contrib's RecurrentPPO's, over
batches in which trajectories begin in the middle of a row."""

import torch
from comparing import compare

WIDTH = 128


def torchrl(kind, layers=1, marked=True):
    from tensordict import TensorDict
    from tensordict.nn import TensorDictModule, TensorDictSequential
    from torchrl.modules import GRUModule, LSTMModule, set_recurrent_mode

    B, T = 64, 32
    states = ["h", "c"] if kind == "LSTM" else ["h"]
    recurrent = (LSTMModule if kind == "LSTM" else GRUModule)(
        WIDTH, WIDTH, num_layers=layers, in_keys=["embed", *states],
        out_keys=["features", *(("next", s) for s in states)],
    )  # fmt: skip
    model = TensorDictSequential(
        TensorDictModule(torch.nn.Linear(16, WIDTH), ["observation"], ["embed"]),
        recurrent,
        TensorDictModule(torch.nn.Linear(WIDTH, 6), ["features"], ["logits"]),
    )
    begins = (torch.rand(B, T, 1) < 0.1) & marked
    data = TensorDict({"observation": torch.randn(B, T, 16), "is_init": begins}, [B, T])
    for name in states:  # as a collector stores them: the state before each step
        data[name] = 0.5 * torch.randn(B, T, layers, WIDTH)

    def run(model):
        with set_recurrent_mode(True):
            out = model(data.to(next(model.parameters()).device))
        return torch.cat([out["logits"].flatten(), *(out["next", s].flatten() for s in states)])

    return model, run


def recurrent_ppo():
    """The update's pass over a batch of 32 sequences of 64 steps, in which episodes begin."""
    from sb3_contrib import RecurrentPPO
    from sb3_contrib.common.recurrent.type_aliases import RNNStates

    B, T = 32, 64
    model = RecurrentPPO("MlpLstmPolicy", "CartPole-v1", device="cpu", seed=0).policy
    observations, actions = torch.randn(B * T, 4), torch.randint(2, (B * T,))
    starts = (torch.rand(B * T) < 0.05).float()
    states = [torch.randn(1, B, 256) for _ in range(4)]

    def run(model):
        device = model.device
        h = [s.to(device) for s in states]
        values, log_prob, entropy = model.evaluate_actions(
            observations.to(device), actions.to(device),
            RNNStates((h[0], h[1]), (h[2], h[3])), starts.to(device),
        )  # fmt: skip
        return torch.cat([values.flatten(), log_prob, entropy])

    return model, run


MODELS = {
    "TorchRL LSTMModule": lambda: torchrl("LSTM"),
    "TorchRL LSTMModule, 2 layers": lambda: torchrl("LSTM", layers=2),
    "TorchRL LSTMModule, no resets": lambda: torchrl("LSTM", marked=False),
    "TorchRL GRUModule": lambda: torchrl("GRU"),
    "sb3-contrib RecurrentPPO": recurrent_ppo,
}


if __name__ == "__main__":
    compare(MODELS)
