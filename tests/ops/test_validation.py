"""Tests what every entry point refuses by the argument's name: layouts, freed memory, sizes,
objects."""

import pytest
import torch

from cases import DEVICE

D = 8


def freed(x):
    x = x.clone()
    x.untyped_storage().resize_(0)
    return x


BAD = {  # invalid value -> (how it is made, what the error says)
    "sparse": (lambda x: x.to_sparse(), "layout torch.sparse_coo, but must be a plain strided"),
    "nested": (lambda x: torch.nested.nested_tensor(list(x)), "layout nested, but must be"),
    "freed": (freed, "must have the memory for it: its storage was freed"),
    "huge": (lambda x: x.new_zeros(1).expand(2**31, *x.shape[1:]), "must have sizes below 2.31"),
}


def calls(fused_rnn, diagonal_rnn, tfla):
    """Returns an entry point, its arguments, and which of them is made invalid."""
    r = torch.randn
    return [
        (fused_rnn.lstm, {"x": r(2, 3, 4, 1, D), "weight": r(4, 1, D, D)}, "x"),
        (fused_rnn.lstm_step, {"x": r(2, 4, 1, D), "weight": r(4, 1, D, D)}, "x"),
        (fused_rnn.linear, {"x": r(2, D), "weight": r(3, D)}, "weight"),
        (diagonal_rnn.flash_gru, {"x": r(2, 3, 3, D), "a": r(3, D)}, "x"),
        (diagonal_rnn.flash_gru_step, {"x": r(2, 3, D), "a": r(3, D)}, "x"),
        (diagonal_rnn.linear_scan, {"a": r(2, 3, D), "b": r(2, 3, D)}, "b"),
        (diagonal_rnn.causal_conv, {"x": r(2, 3, D), "weight": r(D, 4)}, "x"),
        (tfla.mlstm, {**dict.fromkeys("qkv", r(2, 3, 1, D)), **dict.fromkeys("if", r(2, 3, 1))}, "k"),
        (tfla.linear_step, {"x": r(2, D), "weights": [r(3, D)]}, "x"),
    ]  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
def test_refused_by_name(fused_rnn, diagonal_rnn, tfla, kind):
    make, text = BAD[kind]
    for entry, call, name in calls(fused_rnn, diagonal_rnn, tfla):
        with pytest.raises((TypeError, ValueError), match=f"^{name} has .*{text}"):
            entry(**{**call, name: make(call[name])})


def test_a_wrong_object_is_shown_without_reading_it(fused_rnn):
    """The text of a tensor without memory would be read from invalid addresses."""
    for wrong in (freed(torch.ones(3)), torch.ones(1000), object(), 10**400):
        with pytest.raises(ValueError, match=r"^backend is a "):
            fused_rnn.lstm(torch.randn(1, 1, 4, 1, 1), torch.randn(4, 1, 1, 1), backend=wrong)


def test_a_step_refuses_a_state_that_it_cannot_write(diagonal_rnn):
    x, weight = torch.randn(2, D), torch.randn(D, 4)
    for window, text in (
        (torch._neg_view(torch.randn(2, 3, D)), "is a view that negates another tensor"),
        (torch.randn(1, 3, D).expand(2, 3, D), "no two elements may share memory"),
    ):
        with pytest.raises(ValueError, match=f"^window .*{text}"):
            diagonal_rnn.conv_step(x, weight, None, window)


def test_a_step_falls_back_where_the_binary_cannot_write(diagonal_rnn):
    """A window that is strided, of odd width or absent: "auto" takes the reference; by name it is
    an error."""
    for width, wide in ((D, 2 * D), (5, 5), (0, 0)):
        x, weight = torch.randn(2, width), torch.randn(width, 4)
        window = torch.randn(2, 3, wide)[..., :width]
        want, kept = [
            (diagonal_rnn.conv_step(x, weight, None, w, backend=b), w)
            for b, w in (("auto", window.clone()), ("reference", window.clone()))
        ]
        y = diagonal_rnn.conv_step(x, weight, None, window)
        torch.testing.assert_close(y, kept[0])
        torch.testing.assert_close(want[0], kept[0])
        torch.testing.assert_close(window, kept[1])
    window = torch.randn(2, 3, 2 * D)[..., :D]
    with pytest.raises(ValueError, match=f"backend is '{DEVICE}', but needs"):
        diagonal_rnn.conv_step(torch.randn(2, D), torch.randn(D, 4), None, window, backend=DEVICE)
