"""Which backend a call takes: a table over what is asked for, the device, the binary and the dtype."""

import pytest
import torch

from flashcell.kernels import diagonal_rnn, fused_rnn, tfla

FP32, FP64 = torch.float32, torch.float64
TAKEN = [  # requested, device, binary, dtype -> backend
    ("auto", "cpu", "cpu", FP32, "cpu"),
    ("auto", "cpu", "cpu", FP64, "cpu"),
    ("auto", "cpu", "cuda", FP32, "reference"),
    ("auto", "cpu", None, FP32, "reference"),
    ("auto", "cuda", "cuda", FP32, "cuda"),
    ("auto", "cuda", "cuda", FP64, "reference"),
    ("auto", "cuda", "cpu", FP32, "reference"),
    ("auto", "cuda", None, FP32, "reference"),
    ("reference", "cuda", "cuda", FP32, "reference"),
    ("cpu", "cpu", "cpu", FP64, "cpu"),
    ("cuda", "cuda", "cuda", FP32, "cuda"),
]
REFUSED = [  # requested, device, binary, dtype, what is raised, what it says
    ("cuda", "cuda", "cuda", FP64, ValueError, "x has dtype torch.float64, but backend 'cuda'"),
    ("cuda", "cpu", "cuda", FP32, ValueError, "backend is 'cuda', but the tensors are on 'cpu'"),
    ("cpu", "cpu", "cuda", FP32, RuntimeError, "this copy of the kernel holds the 'cuda' binary"),
    ("cpu", "cpu", None, FP32, RuntimeError, "this copy of the kernel holds no binary"),
    ("triton", "cpu", "cpu", FP32, ValueError, "backend is 'triton', but must be one of auto"),
]


@pytest.fixture(params=[fused_rnn, diagonal_rnn, tfla], ids=lambda kernel: kernel.__name__)
def select(request):
    return request.param.dispatch.select_backend


@pytest.mark.parametrize("row", TAKEN, ids=str)
def test_a_backend_is_taken(select, row):
    *arguments, expected = row
    assert select(*arguments) == expected


@pytest.mark.parametrize("row", REFUSED, ids=str)
def test_a_backend_is_refused(select, row):
    *arguments, error, said = row
    with pytest.raises(error, match=said):
        select(*arguments)
