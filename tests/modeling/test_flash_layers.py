"""Tests FlashGRU and FlashLSTM: the kernel's cells behind the published projection, initialisation
and bound."""

import math
import pickle

import pytest
import torch
from torch import nn

import flashcell
from cases import DEVICE
from flashcell import kernel_info
from flashcell.kernels import diagonal_rnn as reference
from flashcell.layers.diagonal_rnn import Bound, HeadwiseLinear
from flashcell.layers.headwise_linear import headwise_product
from numerics import assert_as_accurate, assert_bitwise, assert_close

LAYERS = {"flash_gru": flashcell.FlashGRU, "flash_lstm": flashcell.FlashLSTM}
KINDS = pytest.mark.parametrize("kind", LAYERS)
B, T, I, D = 3, 11, 12, 20


def make(kind, **options):
    """A layer whose gates move, with larger weights than the published ones."""
    layer = LAYERS[kind](I, D, **{"num_heads": 4, "dtype": torch.float64, **options})
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.randn_like(p))
    return layer


def rows(layer):
    return [p for name, p in layer.named_parameters() if name in ("a", "p")]


def by_hand(layer, x, state=None, bound=0.5, **options):
    """The projection as the papers write it, and the reference cell."""
    weight, heads = layer.in_proj.weight, layer.in_proj.num_heads
    slices = x.unflatten(-1, (heads, -1))
    u = torch.einsum("...ni,ngji->...gnj", slices, weight).flatten(-2) + layer.in_proj.bias
    cell = getattr(reference, layer.kernel_cell + ("" if x.dim() == 3 else "_step"))
    weights = [w.clamp(-bound, bound) for w in rows(layer)]
    return cell(u, *weights, state, backend="reference", **options)


MASKS = {
    "plain": dict,
    "reset and hold": lambda: {"reset": torch.rand(B, T) < 0.2, "hold": torch.rand(B, T) < 0.2},
    "lengths": lambda: {"lengths": torch.tensor([3, T, 0])},
    "cu_seqlens": lambda: {"cu_seqlens": torch.tensor([0, 4, 4, T])},
}


@KINDS
@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("heads", [1, 4])
def test_is_the_projection_and_the_cell(kind, heads, masks):
    """Outputs, last states and gradients equal those of a linear projection and the kernel's cell."""
    layer, options = make(kind, num_heads=heads), MASKS[masks]()
    x = torch.randn(1 if masks == "cu_seqlens" else B, T, I, dtype=torch.float64).requires_grad_()
    states = reference.CELLS[kind].states
    state = tuple(torch.randn(3, D, dtype=torch.float64).requires_grad_() for _ in range(states))
    sources = [x, *state, *layer.parameters()]
    got, want = layer(x, state, **options), by_hand(layer, x, state, **options)
    pairs = list(zip((got[0], *got[1]), (want[0], *want[1]), strict=True))
    for g, w in pairs:
        assert_close("output", g, w, 1e-14)
    weights = [torch.randn_like(w) for _, w in pairs]
    grads = [torch.autograd.grad(list(side), sources, weights) for side in zip(*pairs, strict=True)]
    for source, g, w in zip(sources, *grads, strict=True):
        # The bound changes these gradients; another test covers it.
        if any(source is p for p in rows(layer)):
            g, w = (torch.where(source.abs() > 0.5, 0.0, v) for v in (g, w))
        assert_close(f"gradient {list(source.shape)}", g, w, 1e-13)


@KINDS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_accuracy(kind, dtype):
    layer = make(kind, dtype=dtype)
    x = torch.randn(B, T, I).to(dtype)
    (h, state), (peer, _) = layer(x), by_hand(layer, x)
    exact, _ = by_hand(layer.double(), x.double())
    assert h.dtype == dtype
    assert state[0].dtype == torch.float32
    assert_as_accurate("h", h.detach(), exact, peer, I)


@KINDS
def test_steps_are_the_sequence(kind):
    layer = make(kind)
    x = torch.randn(B, T, I, dtype=torch.float64)
    h, last = layer(x)
    state, outputs = None, []
    for t in range(T):
        out, state = layer.step(x[:, t], state)
        outputs.append(out)
    assert_close("h", torch.stack(outputs, 1), h, 1e-14)
    for s, end in zip(state, last, strict=True):
        assert_close("state", s, end, 1e-14)
    first, carried = layer(x[:, :5])
    assert_close("halves", torch.cat([first, layer(x[:, 5:], carried)[0]], 1), h, 1e-14)


@KINDS
def test_autocast(kind):
    """Parameters in fp32, activations in bf16, gradients in fp32."""
    layer = make(kind, dtype=torch.float32)
    with torch.autocast(DEVICE, torch.bfloat16):
        h, state = layer(torch.randn(B, T, I))
    assert (h.dtype, state[0].dtype) == (torch.bfloat16, torch.float32)
    h.float().sum().backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.any() for p in layer.parameters())


@KINDS
def test_methods(kind):
    """A method that is parallel in time runs on devices that have it; others refuse it by name."""
    x = torch.randn(B, T, I)
    layer = make(kind, dtype=torch.float32)
    sequential, _ = layer(x)
    for method in ("newton", "multiple_shooting"):
        for layer.method, layer.backend in ((method, "reference"), (method, "auto")):
            if (DEVICE, layer.backend) != ("cpu", "auto"):
                assert (layer(x)[0] - sequential).abs().max() < 2e-6
                continue
            with pytest.raises(ValueError, match=f"method is '{method}', but on the CPU it must"):
                layer(x)


@KINDS
def test_the_binary_runs(kind):
    # The widest dtype that the binary has.
    dtype = torch.float64 if DEVICE == "cpu" else torch.float32
    layer = make(kind, dtype=dtype)
    assert kernel_info("diagonal-rnn", DEVICE).source == "local"
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(B, T, I, dtype=dtype)
    assert_bitwise("h", compiled(x)[0].detach(), layer(x)[0].detach())


@KINDS
def test_published_initialisation(kind):
    torch.manual_seed(0)
    layer = LAYERS[kind](512, 1024, num_heads=4)
    deviation = 1 / math.sqrt(1024)
    for p in rows(layer):
        assert p.abs().max() <= 3 * deviation
        assert abs(p.std() / deviation - 0.986) < 0.04  # 0.9866 for a normal distribution cut at 3
    bound = math.sqrt(6 / 128)  # Kaiming-uniform of a head's fan-in
    weight = layer.in_proj.weight
    assert weight.shape == (4, 3, 256, 128)
    assert weight.abs().max() <= bound
    assert abs(weight.std() / (bound / math.sqrt(3)) - 1) < 0.01
    assert not layer.in_proj.bias.any()
    # 3 d_in d_h / heads + 3 d of biases + a (+ p), counted as published
    peepholes = 2 * 1024 if kind == "flash_lstm" else 0
    assert sum(p.numel() for p in layer.parameters()) == 3 * 512 * 1024 // 4 + 6 * 1024 + peepholes


@KINDS
def test_the_bound(kind):
    x = torch.randn(B, T, I, dtype=torch.float64)
    for bound in (0.5, 0.9, None):
        layer = make(kind, max_recurrent=bound)
        want, _ = by_hand(layer, x, bound=math.inf if bound is None else bound)
        assert_close(f"max_recurrent={bound}", layer(x)[0], want, 1e-14)


def test_the_bound_catches_nothing():
    """Beyond the bound only inward gradients pass; descent moves against the gradient."""
    rows = torch.tensor([0.3, 0.5, 0.7, 0.7, -0.7, -0.7], requires_grad=True)
    bounded = Bound.apply(rows, 0.5)
    assert torch.equal(bounded.detach(), torch.tensor([0.3, 0.5, 0.5, 0.5, -0.5, -0.5]))
    bounded.backward(torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, -1.0]))
    assert torch.equal(rows.grad, torch.tensor([1.0, -1.0, 1.0, 0.0, 0.0, -1.0]))


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("bias", [False, True])
def test_headwise_linear(heads, bias):
    """Equals a block-diagonal nn.Linear, for any leading dimensions."""
    layer = HeadwiseLinear(6, 9, 2, heads, bias, dtype=torch.float64)
    if bias:
        nn.init.normal_(layer.bias)
    x = torch.randn(2, 4, 5, 6, dtype=torch.float64)
    blocks = [torch.block_diag(*layer.weight[:, g]) for g in range(2)]
    want = torch.stack([x @ block.T for block in blocks], -2)
    want = want + layer.bias if bias else want
    assert_close("y", layer(x), want, 1e-14)
    product, beside = layer(x, apart=True)
    if bias:  # values that stay when FSDP frees the module's parameters during its call
        assert torch.equal(beside, layer.bias)
        assert beside.data_ptr() != layer.bias.data_ptr()
    else:
        assert beside is None
    together = product.movedim(0, -2).flatten(-2)
    assert_close("product", together if beside is None else together + beside, want, 1e-14)
    assert layer(x[:0]).shape == (0, 4, 5, 2, 9)
    assert layer(x[0, 0, 0]).shape == (2, 9)


def test_headwise_product():
    """First and second gradients are right, contiguous, and the same where it is compiled."""
    x = torch.randn(2, 5, 12, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 2, 6, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(headwise_product, (x, weight))
    assert torch.autograd.gradgradcheck(headwise_product, (x, weight))
    dy = torch.randn(3, 2, 5, 2, 6, dtype=torch.float64)
    grads = torch.autograd.grad(headwise_product(x, weight), (x, weight), dy)
    assert all(grad.is_contiguous() for grad in grads)
    compiled = torch.compile(headwise_product, fullgraph=True, backend="aot_eager")
    for got, want in zip(
        torch.autograd.grad(compiled(x, weight), (x, weight), dy), grads, strict=True
    ):
        assert_close("gradient", got, want, 1e-14)


@KINDS
def test_autocast_leaves_float64_alone(kind):
    layer, x = make(kind), torch.randn(B, T, I, dtype=torch.float64)
    want, _ = layer(x)
    with torch.autocast(DEVICE, torch.bfloat16):
        got, _ = layer(x)
    assert_bitwise("h", got, want)


@KINDS
def test_learns_and_travels(kind):
    """A layer trains, and its pickle and its state dict contain all of it."""
    layer = LAYERS[kind](2, 16)
    head = nn.Linear(16, 1)
    optimizer = torch.optim.Adam([*layer.parameters(), *head.parameters()], lr=0.02)
    x = torch.randn(32, 10, 2)
    target = x[..., :1].cumsum(1).tanh()
    losses = []
    for _ in range(60):
        loss = (head(layer(x)[0]) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]
    want = layer(x)[0]
    assert_bitwise("pickled", pickle.loads(pickle.dumps(layer))(x)[0], want)
    other = LAYERS[kind](2, 16)
    other.load_state_dict(layer.state_dict())
    assert_bitwise("loaded", other(x)[0], want)
    assert "max_recurrent=0.5, method='auto'" in repr(layer)
    assert "in_proj" in repr(layer)


WRONG = {
    "heads of the input": (
        {"num_heads": 5},
        "input_size is 12, but must be a multiple of num_heads",
    ),
    "heads of the state": (
        {"num_heads": 3},
        "hidden_size is 20, but must be a multiple of num_heads",
    ),
    "no heads": ({"num_heads": 0}, "input_size is 12, but must be a multiple of num_heads = 0"),
    "bound": ({"max_recurrent": 0.0}, "max_recurrent is 0.0, but must be None or a number > 0"),
    "method": (
        {"method": "fast"},
        "method is 'fast', but must be one of auto, sequential, multiple_shooting, newton",
    ),
    "backend": ({"backend": "gpu"}, "backend is 'gpu', but must be one of auto, cuda, cpu"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_options_are_named(what):
    options, message = WRONG[what]
    with pytest.raises(ValueError, match=message):
        flashcell.FlashGRU(12, 20, **options)


@KINDS
def test_wrong_inputs_are_named(kind):
    layer = LAYERS[kind](I, D)
    with pytest.raises(ValueError, match=r"x has shape \[2, 12\], but must be \[B, T, 12\]"):
        layer(torch.zeros(2, I))
    with pytest.raises(ValueError, match=r"x has shape \[2, 3, 12\], but must be \[B, 12\]"):
        layer.step(torch.zeros(2, 3, I))
    with pytest.raises(ValueError, match=r"x has shape \[2, 3, 5\], but must be \[B, T, 12\]"):
        layer(torch.zeros(2, 3, 5))
    with pytest.raises(TypeError, match="x is a list, but must be a tensor"):
        layer([])
    with pytest.raises(ValueError, match="reset has shape"):
        layer(torch.zeros(2, 3, I), reset=torch.zeros(3, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match="state is 3 tensors"):
        layer(torch.zeros(2, 3, I), (torch.zeros(2, D),) * 3)
    for steps in (1, 3):  # one step uses another path
        with pytest.raises(TypeError, match="path has 'return_info', but must be of method, tol"):
            layer(torch.zeros(2, steps, I), return_info=True)
        with pytest.raises(ValueError, match="method is 'fast', but must be one of auto"):
            layer(torch.zeros(2, steps, I), method="fast")
