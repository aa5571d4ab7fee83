"""Tests that models of other packages compute the same after `flashcell.accelerate`, and gradients
too. Environment and kernels are those of test_clients.py."""

import json
import os
import subprocess

import pytest

from clients.test_clients import PROGRAMS, PYG, ROOT, SPEECHBRAIN, install  # noqa: F401 -- a fixture

TIREX = "--no-deps tirex-ts==1.4.2 scikit-learn narwhals joblib threadpoolctl scipy cloudpickle"
TIREX_2 = "--no-deps tirex-2==0.4.0 flashrnn==1.0.8 mlstm_kernels==2.0.6 narwhals"
XLSTM = "--no-deps xlstm==2.0.6 mlstm_kernels==2.0.6 einops omegaconf dacite rich"
TORCHRL = "--no-deps torchrl==0.14.1 tensordict==0.15.3 cloudpickle pyvers"
PPO, DARTS, GLUONTS = (PROGRAMS[name] for name in ("recurrent_ppo", "darts", "gluonts"))
NEURALFORECAST, TFT = PROGRAMS["neuralforecast LSTM"], PROGRAMS["pytorch_forecasting sgd"]
DEMUCS = "--no-deps demucs==4.1.0 julius==0.2.8 einops openunmix==1.3.0"
TRANSFORMERS = "transformers"
# Script and model -> what pip installs, modules swapped, and bounds of outputs and gradients relative
# to their own, three times what was seen. TiRex computes in bfloat16 on both sides, where each rounds
# other values.
MODELS = {
    "xlstm: sLSTM and mLSTM": (XLSTM, 4, 1e-6, 2e-4),
    "xlstm: sLSTM": (XLSTM, 4, 1e-6, 3e-6),
    "xlstm: mLSTM": (XLSTM, 4, 1e-6, 3e-6),
    "xlstm: xLSTMLarge": (XLSTM, 3, 3e-6, 3e-5),
    "tirex: TiRex, 1 series": (TIREX, 12, 4e-4, 7e-2),
    "tirex2: TiRex-2 sLSTM, 1 series": (TIREX_2, 6, 1e-6, None),
    "tirex2: TiRex-2 mLSTM, 1 series": (TIREX_2, 6, 3e-6, None),
    "reinforcement: TorchRL LSTMModule": (TORCHRL, 2, 1e-6, 3e-6),
    "reinforcement: TorchRL LSTMModule, 2 layers": (TORCHRL, 2, 1e-6, 3e-6),
    "reinforcement: TorchRL LSTMModule, no resets": (TORCHRL, 2, 1e-6, 3e-6),
    "reinforcement: TorchRL GRUModule": (TORCHRL, 2, 1e-6, 3e-6),
    "reinforcement: sb3-contrib RecurrentPPO": (PPO, 3, 1e-6, 2e-6),
    "forecasting: darts BlockRNN": (DARTS, 1, 1e-6, 4e-6),
    "forecasting: neuralforecast LSTM": (NEURALFORECAST, 1, 1e-6, 2e-6),
    "forecasting: neuralforecast DeepAR": (NEURALFORECAST, 1, 1e-6, 2e-6),
    "forecasting: gluonts DeepAR": (GLUONTS, 1, 1e-6, 6e-6),
    "forecasting: pytorch-forecasting TFT": (TFT, 2, 1e-6, 2e-6),
    "layers: speechbrain CRDNN": (SPEECHBRAIN, 1, 1e-6, 4e-6),
    "layers: speechbrain decoder": (SPEECHBRAIN, 2, 1e-6, 1e-6),
    "layers: Demucs": (DEMUCS, 5, 1e-6, 3e-6),
    "layers: PyG LSTM aggregation": (PYG, 1, 1e-6, 6e-6),
    "layers: PyG Set2Set": (PYG, 1, 1e-6, 2e-6),
    "transformers: EnCodec": (TRANSFORMERS, 2, 1e-6, 3e-6),
    "transformers: Parakeet TDT": (TRANSFORMERS, 1, 1e-6, 1e-6),
    "transformers: Nemotron ASR streaming": (TRANSFORMERS, 1, 1e-6, 1e-6),
    "transformers: Nemotron 3.5 ASR": (TRANSFORMERS, 1, 1e-6, 1e-6),
    "transformers: SLANet": (TRANSFORMERS, 1, 1e-6, 2e-6),
    "transformers: SLANeXt": (TRANSFORMERS, 1, 1e-6, 2e-6),
}


@pytest.mark.slow
@pytest.mark.parametrize("program", MODELS)
def test_computes_alike(install, fused_rnn, tfla, program):  # noqa: F811
    requirement, swapped, bound, gradient_bound = MODELS[program]
    script, model = program.split(": ")
    kernels = ":".join(
        f"flashcell/{name}={ROOT / 'kernel_builds' / name}" for name in ("fused-rnn", "tfla")
    )
    environment = {**os.environ, "LOCAL_KERNELS": kernels, "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [install(requirement), ROOT / "tests" / "clients" / f"run_{script}.py", model],
        env=environment, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.strip().splitlines()[-1])
    assert result["swapped"] == swapped
    assert f"{swapped} of {swapped} recurrent modules became flashcell's" in result["log"]
    assert result["same_state_dict"]
    assert result["restored"]
    assert result["error"] <= bound, result
    if gradient_bound is not None:
        assert result["gradient_error"] <= gradient_bound, result
        assert result["gradient_error_inside"] <= gradient_bound, result
