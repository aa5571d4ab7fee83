"""Tests what a run reports: gates as the equations have them, norms, the solver's residual."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from training.monitors import gradient_norms, watch_gates

SIZES = {"vocab_size": 16, "hidden_size": 16, "num_hidden_layers": 2, "num_heads": 2}


def make(kind: str, **changes):
    config = AutoConfig.for_model(kind, **SIZES, backend="reference", **changes)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def gates(model, **inputs) -> dict:
    with watch_gates(model) as values:
        model(torch.arange(12)[None] % 16, use_cache=False, **inputs)
    assert not any(module._forward_hooks for module in model.modules())
    return values


@pytest.mark.parametrize("cell", ["lstm", "gru", "slstm"])
def test_gates_of_a_fused_cell(cell):
    """Computed by the torch reference of one step, from the outputs of the step before."""
    from flashcell.kernels.fused_rnn.cells import CELLS

    model = make("flash_rnn", cell=cell, intermediate_size=16)
    values, seen = gates(model), {}
    mixer = model.model.layers[0].mixer
    mixer.register_forward_hook(lambda module, inputs, output: seen.update(x=inputs[0]))
    model(torch.arange(12)[None], use_cache=False)
    x = mixer.in_proj(seen["x"]).unflatten(-1, (mixer.num_gates, *mixer.gate_bias.shape[1:]))
    weight, bias = mixer.recurrent_weight, mixer.gate_bias
    states = [torch.zeros(1, *bias.shape[1:]) for _ in range(CELLS[cell].states)]
    which = {
        "lstm": {"i": 0, "f": 1, "o": 2 + 1},
        "gru": {"r": 0, "z": 1},
        "slstm": {"f": 1, "o": 3},
    }
    found: dict[str, list] = {gate: [] for gate in which[cell]}
    for t in range(12):
        r = torch.einsum("gnjk,bnk->gbnj", weight, states[0])
        inputs = [x[:, t, g] + bias[g] for g in range(mixer.num_gates)]
        for gate, g in which[cell].items():
            found[gate].append(torch.sigmoid(inputs[g] + r[g]))
        r = list(r)
        if len(bias) > mixer.num_gates:
            r[-1] = r[-1] + bias[-1]
        states = CELLS[cell].step(tuple(inputs), tuple(r), tuple(states))
    for gate, each in found.items():
        want = torch.stack(each[1:])
        assert values["model.layers.0", f"{gate}_mean"] == pytest.approx(
            want.mean().item(), rel=1e-5
        )
        outside = ((want < 0.05) | (want > 0.95)).float().mean().item()
        assert values["model.layers.0", f"{gate}_saturated"] == pytest.approx(outside)


def test_the_first_step_of_a_document_is_left_out():
    """A document's first step begins with an empty state, which a mixer's outputs do not show, so
    monitors leave it out."""
    model = make("flash_rnn", intermediate_size=16)
    positions = torch.arange(12)[None] % 2  # every other step begins a document
    values = gates(model, position_ids=positions)
    model.model.layers[0].mixer.recurrent_weight.data.zero_()
    assert values != gates(model, position_ids=positions)


@pytest.mark.parametrize("method", ["sequential", "newton", "multiple_shooting"])
@pytest.mark.parametrize(("cell", "names"), [("flash_gru", "zr"), ("flash_lstm", "fo")])
def test_gates_and_residual_of_a_diagonal_cell(cell, names, method):
    model = make("flash_rnn", cell=cell, method=method, intermediate_size=16)
    values, seen = gates(model), {}
    cells = model.model.layers[0].mixer.cell
    cells.register_forward_hook(
        lambda module, inputs, output: seen.update(x=inputs[0], h=output[0])
    )
    model(torch.arange(12)[None], use_cache=False)
    for block in ("model.layers.0", "model.layers.1"):
        iterations = values[block, "newton_iterations"]
        assert (iterations > 0) == (method != "sequential")
        assert 0 <= values[block, "newton_residual"] < 1e-3
        for gate in names:
            assert 0 < values[block, f"{gate}_mean"] < 1
    if cell == "flash_gru":
        u, a, h = cells.in_proj(seen["x"]), cells.a.clamp(-0.5, 0.5), seen["h"]
        before = torch.nn.functional.pad(h[:, :-1], (0, 0, 1, 0))
        want = torch.sigmoid(u[:, :, 0] + a[0] * before).mean().item()
        assert values["model.layers.0", "z_mean"] == pytest.approx(want, rel=1e-4)


@pytest.mark.parametrize("gate", ["exp", "sigmoid"])
def test_gates_of_an_mlstm(gate):
    model = make("flash_mlstm", qk_dim_factor=1.0, input_gate=gate, input_gate_bias_init=-10.0)
    values = gates(model)
    want = -10 / 15
    if gate == "exp":
        expected = 15 * torch.tanh(torch.tensor(want)).item()
        assert values["backbone.blocks.1", "i_mean"] == pytest.approx(expected, abs=1.0)
    else:
        assert values["backbone.blocks.1", "i_mean"] < 0.01
        assert values["backbone.blocks.1", "i_saturated"] == 1
    assert values["backbone.blocks.1", "f_mean"] > 0.9


def test_gradient_norms_are_those_of_the_blocks():
    model = make("flash_rnn", intermediate_size=16)
    ids = torch.arange(12)[None]
    model(ids, labels=ids).loss.backward()
    norms = gradient_norms(model)
    assert {where for where, _ in norms} == {
        "model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "lm_head",
    }  # fmt: skip
    block = [p.grad.flatten() for p in model.model.layers[1].parameters()]
    want = torch.cat(block).norm().item()
    assert norms["model.layers.1", "gradient_norm"] == pytest.approx(want, rel=1e-5)
