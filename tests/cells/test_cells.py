"""The cell structs alone: finite differences, compiled with g++ and nothing else."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_gradients_against_finite_differences(tmp_path):
    binary = tmp_path / "gradcheck"
    include = [ROOT / "kernel_builds" / folder for folder in ("cmake/include", "fused-rnn/csrc")]
    source = Path(__file__).with_name("gradcheck.cpp")
    command = ["g++", "-std=c++20", "-O1", *(f"-I{i}" for i in include), source, "-o", binary]
    subprocess.run(command, check=True)
    done = subprocess.run([binary], capture_output=True, text=True)
    print(done.stdout)
    assert done.returncode == 0, done.stdout
    for name in ("lstm", "gru", "rnn_tanh", "rnn_relu", "slstm"):
        assert name in done.stdout
