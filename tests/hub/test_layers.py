"""Tests that `kernels.kernelize` runs torch.nn's own modules on our layers, by its rules for Hub
layers."""

from pathlib import Path

import pytest
import torch
from kernels import (
    LocalLayerRepository,
    Mode,
    kernelize,
    replace_kernel_forward_from_hub,
    use_kernel_mapping,
)

from numerics import assert_close

MODULES = {
    "LSTM": (torch.nn.LSTM, (8, 16, 2)),
    "GRU": (torch.nn.GRU, (8, 16)),
    "RNN": (torch.nn.RNN, (8, 16)),
    "LSTMCell": (torch.nn.LSTMCell, (8, 16)),
    "GRUCell": (torch.nn.GRUCell, (8, 16)),
    "RNNCell": (torch.nn.RNNCell, (8, 16)),
}


@pytest.mark.parametrize("name", MODULES)
def test_kernelized_module_equals_torch(fused_rnn, name):
    module, sizes = MODULES[name]
    # The switch is set on a class: torch's own classes stay unchanged.
    twin = type(name, (module,), {})
    replace_kernel_forward_from_hub(twin, name)
    ours, torchs = twin(*sizes), module(*sizes)
    ours.load_state_dict(torchs.state_dict())
    variant = Path(fused_rnn.__file__).parent
    layer = LocalLayerRepository(variant.parents[1], layer_name=name)
    x = torch.randn(*((5, 8) if name.endswith("Cell") else (6, 5, 8)))
    with use_kernel_mapping({name: {"cpu": layer}}, inherit_mapping=False):
        model = kernelize(torch.nn.Sequential(ours), mode=Mode.TRAINING, device="cpu")
    assert model[0].forward.__func__ is not module.forward
    results = []
    for m in (model[0], torchs):
        out = m(x)
        out = out if isinstance(out, torch.Tensor) else out[0]
        results.append([out, *torch.autograd.grad(out.sum(), list(m.parameters()))])
    for got, want in zip(*results, strict=True):
        assert_close(name, got, want, 2e-6)
