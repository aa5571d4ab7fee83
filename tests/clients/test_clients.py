"""Tests that other programs train 20 steps alike on torch.nn's modules and on flashcell's.

The environment clients/ of the state folder is made where it is absent: torch at the version of
constraints.txt, flashcell from this checkout, and each program that installs beside them. One script
by hand, in that environment:

    LOCAL_KERNELS=flashcell/fused-rnn=$PWD/kernel_builds/fused-rnn \
    .flashcell/clients/bin/python tests/clients/train_darts.py --flashcell --out ours.npz
"""

import fcntl
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tooling import environment as python_environment

ROOT = Path(__file__).resolve().parents[2]

HOME = Path(os.environ.get("FLASHCELL_HOME") or ROOT / ".flashcell").resolve()
# torchaudio does not load beside torch for the CPU, and transformers then fails too: install
# without it.
SPEECHBRAIN = "--no-deps speechbrain==1.1.2 hyperpyyaml==1.2.3 ruamel.yaml==0.18.17 scipy"
PYG = "torch-geometric==2.8.1"
PROGRAMS = {  # script and its arguments -> what pip installs
    "lightning": "lightning==2.6.6",
    "neuralforecast LSTM": "neuralforecast==3.3.0",
    "neuralforecast RNN": "neuralforecast==3.3.0",
    "neuralforecast DeepAR": "neuralforecast==3.3.0",
    "darts": "darts==0.48.1",
    "gluonts": "gluonts[torch]==0.17.0",
    "pytorch_forecasting sgd": "pytorch-forecasting==1.8.0",
    # Adam divides by the gradient's size. Where that is near 0 (in fp32 a tenth of these), a
    # rounding error becomes part of a full step, and in fp32 the parameters differ by 3e-4.
    "pytorch_forecasting adam --double": "pytorch-forecasting==1.8.0",
    "recurrent_ppo": "sb3-contrib==2.9.2",
    "speechbrain RNN": SPEECHBRAIN,
    "speechbrain LSTM": SPEECHBRAIN,
    "speechbrain GRU": SPEECHBRAIN,
    "speechbrain RNNCell": SPEECHBRAIN,
    "speechbrain LSTMCell": SPEECHBRAIN,
    "speechbrain GRUCell": SPEECHBRAIN,
    "speechbrain decoder": SPEECHBRAIN,
    # After batch norm a rounding can change the side of a leaky relu: in fp32 once 5e-6.
    "speechbrain CRDNN --double": SPEECHBRAIN,
    "torch_geometric lstm_aggregation": PYG,
    "torch_geometric gru_aggregation": PYG,
    "torch_geometric jumping_knowledge": PYG,
    "torch_geometric gated_graph_conv": PYG,
    "torch_geometric set2set": PYG,
    "torch_geometric attentive_fp": PYG,
}
# Relative to the norm of each step's losses, gradients or parameters. Seen: 6e-7, and 8e-12 in
# float64. If two biases share one gradient, which clipping then scales twice, every program would
# be off by at least 1.5e-5 in its losses.
BOUNDS = {"float32": 1e-6, "float64": 1e-10}
CLIP = 0.1  # the value in recording.py


def pip(python: Path, *arguments: str) -> str:
    """Returns pip's output if it fails, else nothing."""
    command = [python, "-m", "pip", "install", "-c", ROOT / "constraints.txt", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines = done.stdout.strip().splitlines() or [f"exit status {done.returncode}"]
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines)[-1] if done.returncode else ""


@pytest.fixture(scope="session")
def install():
    """Returns a function that installs a requirement and returns the Python that has it, or skips."""
    folder = HOME / "clients"
    python = folder / "bin" / "python"
    torch = f"torch=={python_environment._pinned('torch')}"
    wanted = hashlib.sha256(f"{ROOT} {sys.version}".encode())
    for name in ("pyproject.toml", "constraints.txt"):
        wanted.update((ROOT / name).read_bytes())
    stamp = folder / wanted.hexdigest()
    HOME.mkdir(parents=True, exist_ok=True)
    with open(HOME / "clients.lock", "w") as lock:  # several processes may run these tests
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not stamp.exists():
            subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
            error = pip(python, f"{torch}+cpu") and pip(python, torch)
            error = error or pip(python, "-e", str(ROOT))
            assert not error, error
            stamp.touch()

    def install(requirement: str) -> Path:
        done = folder / requirement
        with open(HOME / "clients.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                # torch is already there, so that pip installs no other one
                code = "import torch; print(torch.__version__)"
                have = subprocess.run([python, "-c", code], capture_output=True, text=True).stdout
                error = pip(python, *requirement.split(), f"torch=={have.strip()}", "-e", str(ROOT))
                if error:
                    pytest.skip(f"{requirement} does not install: {error}")
                done.touch()
        return python

    return install


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_trains_alike(install, fused_rnn, program, tmp_path):
    python = install(PROGRAMS[program])
    name, *arguments = program.split()
    script = ROOT / "tests" / "clients" / f"train_{name}.py"
    kernel = f"flashcell/fused-rnn={ROOT / 'kernel_builds' / 'fused-rnn'}"
    environment = {**os.environ, "LOCAL_KERNELS": kernel, "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONPATH", None)
    results = []
    for which in ([], ["--flashcell"]):
        out = tmp_path / f"{len(results)}.npz"
        done = subprocess.run(
            [python, script, *which, "--out", out, *arguments],
            cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        results.append(dict(np.load(out)))
    compare(*results, "float64" if "--double" in arguments else "float32")


def compare(own: dict, ours: dict, dtype: str = "float32") -> None:
    assert not own["ours"].any()
    assert ours["ours"].tolist() == [True] * own["ours"].size, "not every module is flashcell's"
    assert own["ours"].size > 0
    norms = np.linalg.norm(own["gradients"].astype(np.float64), axis=1)
    assert np.isclose(norms, CLIP, rtol=1e-4).any(), f"no gradient was clipped: {norms}"
    for name in ("losses", "gradients", "parameters"):
        want, got = (steps[name].reshape(len(steps[name]), -1) for steps in (own, ours))
        assert want.shape == got.shape
        if name != "losses":
            assert want.dtype == got.dtype == dtype
        assert len(want) == 20
        norm = np.linalg.norm(want.astype(np.float64), axis=1)
        error = np.linalg.norm(got.astype(np.float64) - want, axis=1) / norm
        step = error.argmax()
        assert (error <= BOUNDS[dtype]).all(), (
            f"{name}: off by {error[step]:.2g} of the norm at step {step}"
        )


def recorded(is_ours: list[bool], dtype: str = "float32") -> dict:
    steps = np.ones((20, 4), dtype)
    gradients = CLIP / 2 * steps  # the norm of each step's gradient is CLIP
    recorded = {"losses": steps[:, 0], "gradients": gradients, "parameters": steps}
    return {"ours": np.array(is_ours), **recorded}


def test_what_differs_is_seen():
    compare(recorded([False, False]), recorded([True, True]))
    with pytest.raises(AssertionError, match="not every module"):
        compare(recorded([False, False]), recorded([True, False]))
    for name in ("losses", "gradients", "parameters"):
        for wrong in (2e-6, float("nan")):
            ours = recorded([True])
            ours[name] = ours[name].copy()
            ours[name][7] *= 1 + wrong
            with pytest.raises(AssertionError, match=f"{name}: off by .* at step 7"):
                compare(recorded([False]), ours)
    ours = recorded([True], "float64")
    compare(recorded([False], "float64"), ours, "float64")
    ours["gradients"][7] *= 1 + 2e-10
    with pytest.raises(AssertionError, match=r"gradients: off by .* at step 7"):
        compare(recorded([False], "float64"), ours, "float64")
    with pytest.raises(AssertionError):
        compare(recorded([False]), recorded([True]), "float64")
    unclipped = recorded([False])
    unclipped["gradients"] = unclipped["gradients"] / 2
    with pytest.raises(AssertionError, match="no gradient was clipped"):
        compare(unclipped, recorded([True]))
