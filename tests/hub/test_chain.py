"""The real fused-rnn, from its build over the Hub into a process that compiles with it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.hub
ROOT = Path(__file__).resolve().parents[2]
# The kernel is loaded while Dynamo traces, by the first call of the compiled function.
USE = """
import torch
from flashcell.kernel_loader import kernel_info, load_kernel
from flashcell.kernels import fused_rnn as reference

def inputs():
    torch.manual_seed(0)
    shapes = (2, 7, 4, 3, 8), (4, 3, 8, 8), (4, 3, 8)
    return [torch.randn(shape).mul(0.5).requires_grad_() for shape in shapes]

def gradients(function):
    x, weight, bias = inputs()
    h, (_, c) = function(x, weight, bias)
    (h.sum() + c.sum()).backward()
    return [h.detach(), c.detach(), x.grad, weight.grad, bias.grad]

expected = gradients(reference.lstm)
for backend in ("eager", "aot_eager"):
    torch._dynamo.reset()
    call = lambda x, *rest: load_kernel("fused-rnn", x.device.type).lstm(x, *rest)
    torch.testing.assert_close(gradients(torch.compile(call, fullgraph=True, backend=backend)), expected)
module = load_kernel("fused-rnn", "cpu", "cpu")
torch.testing.assert_close(gradients(module.lstm), expected)
assert module.BACKEND == "cpu"
print(kernel_info("fused-rnn").source)
"""


@pytest.mark.slow
def test_real_kernel(fused_rnn, local_hub, tmp_path):
    hub, lock = local_hub.LocalHub(tmp_path / "store").start(), tmp_path / "lock.py"
    run = lambda *command, **more: (
        subprocess.run(
            [sys.executable, *command], check=True, capture_output=True, text=True, **more
        ).stdout
    )
    try:
        build = [ROOT / "scripts/build_kernels", "--here", "--kernel", "fused-rnn"]
        run(*build)  # the CPU variant is there; this adds torch-universal
        publish = [ROOT / "scripts/publish_kernels", "--kernel", "fused-rnn", "--lock", lock]
        assert "lock.py pins" in run(*publish, "--endpoint", hub.url)
        user = {k: v for k, v in os.environ.items() if k != "LOCAL_KERNELS"}
        user |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "FLASHCELL_LOCK": str(lock)}
        assert run("-c", USE, env=user) == "hub\n"
    finally:
        hub.stop()
