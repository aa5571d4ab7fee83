"""Tests that `import flashcell` loads torch alone, while transformers' Auto classes know the
models."""

import copy
import inspect
import os
import pickle
import subprocess
import sys

import pytest

import flashcell
from model_cases import cpu_only

pytestmark = cpu_only
LATE = ["transformers", "huggingface_hub", "kernels", "safetensors", "torch._dynamo"]
STAND_INS = """
import torch, flashcell
layer = flashcell.LSTM(3, 4, backend="reference")
layer(torch.zeros(1, 2, 3))
flashcell.GRUCell(3, 4, backend="reference")(torch.zeros(1, 3))
model = torch.nn.Sequential(torch.nn.LSTM(3, 4), torch.nn.GRU(3, 4), torch.nn.RNN(3, 4))
flashcell.replace(model, backend="reference")
flashcell.restore(model)
with flashcell.drop_in(backend="reference"):
    torch.nn.LSTM(3, 4)
assert flashcell.kernel_info("fused-rnn", backend="reference").source == "reference"
flashcell.load_kernel("fused-rnn", "cpu", "reference")
assert {"FlashRNNForCausalLM", "LSTM", "generate_many"} <= set(dir(flashcell))
"""
WITHOUT = """
import sys
for name in %r:
    sys.modules[name] = None
"""
# An Auto class must know every family, whichever import came first.
KNOWN = """
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)
import flashcell
for kind, family in {"rnn": "RNN", "mlstm": "MLSTM", "xlstm": "XLSTM"}.items():
    config = AutoConfig.for_model("flash_" + kind)
    assert type(config) is getattr(flashcell, f"Flash{family}Config")
    for auto, head in (
        (AutoModel, "Model"),
        (AutoModelForCausalLM, "ForCausalLM"),
        (AutoModelForSequenceClassification, "ForSequenceClassification"),
        (AutoModelForTokenClassification, "ForTokenClassification"),
    ):
        assert auto._model_mapping[type(config)] is getattr(flashcell, f"Flash{family}{head}")
"""
ORDERS = {
    "flashcell first": "import flashcell",
    "transformers first": "import transformers, flashcell",
    "AutoConfig first": "from transformers import AutoConfig\nimport flashcell",
    "AutoModel first": "from transformers import AutoModelForCausalLM\nimport flashcell",
    "a family first": "from flashcell import FlashRNNForCausalLM",
    "a family's module first": "import flashcell.modeling_flash_xlstm",
    "a configuration first": "from flashcell import FlashMLSTMConfig",
    "the configurations first": "import flashcell.configuration.configuration_flash_rnn",
    "serving first": "from flashcell import Batcher",
    "the cache first": "import flashcell.state.cache",
    "the trainer first": "import flashcell\nfrom transformers import Trainer",
    "a model first": "import flashcell\nfrom transformers import LlamaForCausalLM",
    "a pipeline first": "import flashcell\nfrom transformers import pipeline",
    "modeling_layers first": "import flashcell\nimport transformers.modeling_layers",
    "everything": "from flashcell import *",
    "a configuration made before": (
        "import flashcell\nconfig = flashcell.FlashRNNConfig()\n"
        "from transformers import AutoModel\n"
        "assert type(config) in AutoModel._model_mapping"
    ),
    "an unpickled configuration": (  # spawned processes get one, without __init__
        "from copyreg import __newobj__\nimport flashcell\nfrom transformers import AutoModel\n"
        "config = __newobj__(flashcell.FlashRNNConfig)\n"
        "config.__setstate__({'model_type': 'flash_rnn'})\n"
        "assert type(config) in AutoModel._model_mapping"
    ),
    "in a thread": (
        "import threading, flashcell\n"
        "def load():\n"
        "    from transformers import AutoModelForCausalLM\n"
        "    model = AutoModelForCausalLM.from_config(flashcell.FlashRNNConfig(\n"
        "        hidden_size=8, num_heads=2, num_hidden_layers=1, vocab_size=8))\n"
        "    models.append(type(model))\n"
        "models = []\n"
        "first = threading.Thread(target=load)\n"
        "first.start(), first.join()\n"
        "assert models == [flashcell.FlashRNNForCausalLM]"
    ),
    "in many threads": (  # transformers itself cannot be imported by several threads at once
        "import threading, transformers, flashcell\n"
        "def load():\n"
        "    from transformers import AutoModelForCausalLM\n"
        "    model = AutoModelForCausalLM.from_config(flashcell.FlashRNNConfig(\n"
        "        hidden_size=8, num_heads=2, num_hidden_layers=1, vocab_size=8))\n"
        "    models.append(type(model))\n"
        "models = []\n"
        "threads = [threading.Thread(target=load) for _ in range(8)]\n"
        "[t.start() for t in threads], [t.join() for t in threads]\n"
        "assert models == [flashcell.FlashRNNForCausalLM] * 8, models"
    ),
}

FAST = ("flashcell first", "transformers first", "in many threads")
SLOW = pytest.mark.slow


def run(code, *options, **variables):
    command = [sys.executable, *options, "-c", code]
    environment = {**os.environ, **variables}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def test_stand_ins_load_torch_alone():
    loaded = f"import sys\n{STAND_INS}\nprint([n for n in {LATE} if n in sys.modules])"
    assert run(loaded, "-W", "error").stdout.splitlines()[-1] == "[]"


def test_stand_ins_run_where_nothing_but_torch_is():
    run(WITHOUT % LATE[:4] + STAND_INS)


def test_an_error_names_what_a_model_needs():
    code = """
import flashcell
for use in (lambda: flashcell.FlashRNNForCausalLM, lambda: flashcell.generate_many,
            lambda: flashcell.configuration, lambda: exec("from flashcell import *")):
    try:
        use()
    except ImportError as error:
        assert "needs transformers >= 5.17 (pip install" in str(error), error
        assert str(error).startswith("flashcell."), error
        assert error.name.startswith("transformers"), error.name
    else:
        raise AssertionError("no error")
"""
    run(WITHOUT % ["transformers"] + code)


def test_an_unfit_transformers_can_be_used_beside_the_stand_ins(tmp_path):
    """The import gives a warning instead of an error."""
    folder = tmp_path
    for name in ("transformers", "models", "auto"):
        folder /= name
        folder.mkdir()
        (folder / "__init__.py").touch()
    (folder / "configuration_auto.py").write_text("class AutoConfig: pass")
    code = """
import warnings, flashcell
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    import transformers.models.auto.configuration_auto as auto
assert auto.AutoConfig
texts = [str(w.message) for w in seen if w.category is RuntimeWarning]
assert len(texts) == 1 and "flashcell's models are not registered" in texts[0], texts
assert "needs transformers >= 5.17" in texts[0], texts
flashcell.LSTM(3, 4)
"""
    run(code, PYTHONPATH=str(tmp_path))


@pytest.mark.parametrize(
    "order", [pytest.param(o, marks=[] if o in FAST else SLOW) for o in ORDERS]
)
def test_auto_classes_know_the_models(order):
    run(f"{ORDERS[order]}\n{KNOWN}", "-W", "error::RuntimeWarning")


def test_names_stay_what_they_were():
    code = """
import flashcell
assert flashcell.state.cache.RecurrentStateLayer and flashcell.layers.mlstm.HeadNorm
assert flashcell.recurrent_model and flashcell.modeling_flash_rnn
assert flashcell.generation.engine.DecodeEngine and flashcell.configuration.recurrent_config
assert flashcell.kernels.diagonal_rnn.flash_gru and flashcell.hub.download.fetch
assert not hasattr(flashcell, "FlashRNNForNothing") and not hasattr(flashcell, "FlashConfig")
"""
    run(code)
    exec("from flashcell import *", names := {})
    assert set(flashcell.__all__) <= set(names)
    assert all(getattr(flashcell, n) is names[n] for n in flashcell.__all__)
    assert flashcell.FlashRNNModel.__module__ == "flashcell.modeling_flash_rnn"


def test_a_users_own_registration_stays():
    run("""
import flashcell
from transformers import AutoModel
class Mine(flashcell.FlashRNNModel):
    pass
AutoModel.register(flashcell.FlashRNNConfig, Mine, exist_ok=True)
config = flashcell.FlashRNNConfig(hidden_size=8, num_heads=2, num_hidden_layers=1, vocab_size=8)
assert type(AutoModel.from_config(config)) is Mine
""")


def test_a_configuration_shows_its_fields():
    fields = inspect.signature(flashcell.FlashRNNConfig).parameters
    assert {"cell", "hidden_size", "backend", "tie_word_embeddings"} <= set(fields)
    config = flashcell.FlashRNNConfig(hidden_size=8, num_heads=2, num_hidden_layers=1)
    for copied in (pickle.loads(pickle.dumps(config)), copy.deepcopy(config)):
        assert copied.to_dict() == config.to_dict()
        assert copied.backend == config.backend
