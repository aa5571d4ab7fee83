"""Tests that an exported model repository needs torch and transformers, and no flashcell."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.dynamic_module_utils import get_imports

from commands import load_command
from flashcell.hub.lock_format import lock_source
from flashcell.kernels.fused_rnn import CELLS
from model_cases import CASES, cpu_only, kinds

pytestmark = cpu_only
ROOT = Path(__file__).resolve().parents[2]
KERNEL = {"repo": "another/kernel", "version": 2, "revision": None, "variants": {}}
PINNED = {"format": 1, "kernels": {"fused-rnn": KERNEL}}
ALONE = """
import json, sys
from pathlib import Path

import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

ids = torch.arange(12).view(2, 6)
mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])
options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
texts, models = {}, {}
for repo in Path(sys.argv[1]).iterdir():
    model = AutoModelForCausalLM.from_pretrained(repo, trust_remote_code=True).eval()
    assert type(model).__module__.startswith("transformers_modules."), type(model).__module__
    texts[repo.name] = model.generate(ids, attention_mask=mask, **options).tolist()
    model(ids, labels=ids).loss.backward()
    assert all(p.grad.any() for p in model.parameters())
    heads = AutoModelForSequenceClassification, AutoModelForTokenClassification
    for auto in (AutoModel, *heads):
        auto.from_pretrained(repo, trust_remote_code=True)
    models[repo.name] = model
with torch.no_grad():
    for name, model in models.items():  # DynamicCache makes the layers of one of these repositories
        assert model.generate(ids, attention_mask=mask, **options).tolist() == texts[name], name
        reference = model.device.type == "cpu" and model.config.backend == "reference"
        assert (model.decoder.reason is None) != reference, (name, model.decoder.reason)
        model.save_state(model(ids).past_key_values, "state")
        assert model.load_state("state").get_seq_length() == 6
assert not {"flashcell", *sys.argv[2:]} & set(sys.modules)
print(json.dumps(texts))
"""


def run_export(*arguments, **more):
    """Runs the command as a process; returns it, ended, with its output."""
    command = [sys.executable, ROOT / "scripts/export_model", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, **more)


def export(checkpoint, out, lock=None):
    """Exports in this process, which has imported what the command would import first."""
    load_command("export_model").export(Path(checkpoint), Path(out), lock and Path(lock))


def refusal(*arguments) -> str:
    with pytest.raises(SystemExit) as refused:
        export(*arguments)
    return str(refused.value)


def packages_without(folder: Path, missing: tuple) -> Path:
    """Makes a folder of links to all installed packages but some. An editable flashcell is not among
    them either: it is found through the module site, which the test's Python leaves out."""
    folder.mkdir()
    for place in {Path(p) for p in sys.path if p.endswith("-packages")}:
        for entry in place.iterdir():
            ours = entry.name.lower().startswith(("flashcell", "__editable__", *missing))
            if not ours and not (folder / entry.name).exists():
                (folder / entry.name).symlink_to(entry)
    return folder


def generated_alone(repos: Path, home: Path, missing: tuple) -> dict[str, list]:
    packages = packages_without(home / "packages", missing)
    environment = {**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = str(packages)
    if "kernels" in missing:  # a kernel asked for by name requires it
        environment.pop("LOCAL_KERNELS", None)
    done = subprocess.run(
        [sys.executable, "-S", "-c", ALONE, repos, *missing],
        capture_output=True, text=True, env=environment, cwd=home,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "missing",
    [(), pytest.param(("kernels",), marks=pytest.mark.slow)],
    ids=["kernels here", "kernels missing"],
)
def test_loads_where_flashcell_is_not(make_model, tmp_path, missing):
    ids, mask = torch.arange(12).view(2, 6), torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])
    options = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    want = {}
    for case in CASES if missing else kinds():  # the reference runs all, binaries one of each kind
        model = make_model(case, tie_word_embeddings=bool(missing))
        model.config.backend = "reference" if missing else "auto"
        model.save_pretrained(tmp_path / "checkpoints" / case)
        export(tmp_path / "checkpoints" / case, tmp_path / "repos" / case)
        want[case] = model.generate(ids, **options).tolist()
        card = (tmp_path / "repos" / case / "README.md").read_text()
        assert "trust_remote_code=True" in card
        assert model.config.model_type in card
    assert generated_alone(tmp_path / "repos", tmp_path, missing) == want
    for repo in (tmp_path / "repos").iterdir():  # and with flashcell, without that code
        kind = type(AutoModelForCausalLM.from_pretrained(repo))
        assert kind.__module__.startswith("flashcell."), repo.name


def test_the_code_is_flat_and_whole(make_model, tmp_path):
    make_model().save_pretrained(tmp_path / "checkpoint")
    lock = tmp_path / "lock.py"
    lock.write_bytes(lock_source(PINNED, "lock.py"))
    text = lock.read_text()
    lock.write_text(text + "open('/nowhere/ran', 'w')\n")
    (tmp_path / "checkpoint/README.md").write_text("my card")
    for _ in range(2):  # an earlier export may be replaced
        done = run_export(tmp_path / "checkpoint", tmp_path / "repo", "--lock", lock)
        assert done.returncode == 0, done.stderr
    files = {path.name for path in (tmp_path / "repo").iterdir()}
    assert {"modeling_flash_rnn.py", "configuration_flash_rnn.py", "hub_kernel_loader.py"} <= files
    assert {"fused_rnn.py", "fused_rnn_reference.py", "fused_rnn_cells.py"} <= files
    assert not any(name.endswith("_ops.py") or "autograd" in name for name in files)
    # The code after the lock is left out.
    assert (tmp_path / "repo/hub_kernels_lock.py").read_text() == text
    assert (tmp_path / "repo/README.md").read_text() == "my card"
    for path in (tmp_path / "repo").glob("*.py"):  # transformers refuses code that imports more
        needed = set(get_imports(path)) - sys.stdlib_module_names
        assert needed <= {"torch", "transformers", "huggingface_hub", "safetensors"}, path.name
    cells = (tmp_path / "repo/fused_rnn_cells.py").read_text()
    assert all(f"def {name}(" in cells for name in CELLS)


def test_refusals(make_model, tmp_path):
    model, checkpoint = make_model(), tmp_path / "checkpoint"
    (tmp_path / "lock.py").write_text("LOCK = {}")
    done = run_export(tmp_path, tmp_path / "repo")
    assert done.returncode == 1
    assert "has no config.json" in done.stderr
    assert "Traceback" not in done.stderr
    model.config.save_pretrained(checkpoint)
    assert "has no *.safetensors" in refusal(checkpoint, tmp_path / "repo")
    model.save_pretrained(checkpoint)
    assert "exists and is not an earlier export" in refusal(checkpoint, ROOT / "tests")
    said = refusal(checkpoint, tmp_path / "repo", tmp_path / "lock.py")
    assert "lock.py: LOCK is a dict of" in said
    assert not (tmp_path / "repo").exists()
    exported = tmp_path / "exported"
    export(checkpoint, exported)
    assert "but must be another folder" in refusal(exported, exported)
    assert (exported / "model.safetensors").is_file()
    (checkpoint / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert "model_type is 'llama', but must be" in refusal(checkpoint, tmp_path / "repo")
    model.config.save_pretrained(checkpoint)
    config = json.loads((checkpoint / "config.json").read_text())
    for change, says in (
        ({"hidden_size": None}, "hidden_size is None, but must be of type int"),
        ({"cell": ["lstm"]}, "cell is ['lstm'], but must be of type str"),
        ({"model_type": ["flash_rnn"]}, "model_type is ['flash_rnn'], but must be"),
        ([1], "not a JSON object"),
    ):
        text = json.dumps({**config, **change} if isinstance(change, dict) else change)
        (checkpoint / "config.json").write_text(text)
        assert says in refusal(checkpoint, exported)
        assert (exported / "model.safetensors").is_file(), "the earlier export is lost"
    (checkpoint / "config.json").write_text("{")
    assert "is not JSON" in refusal(checkpoint, exported)


ODD = ['{"auto_map": []}', "{bad", "[]", '{"auto_map": {"AutoConfig": null}}', "\0", "{}"]
ODD += ['{"auto_map": {"AutoConfig": ["configuration_flash_rnn"]}}', "[" * 100_000]


@pytest.mark.parametrize("config", ODD, ids=range(len(ODD)))
def test_a_folder_with_an_odd_configuration_is_not_replaced(make_model, tmp_path, config):
    checkpoint, out = tmp_path / "checkpoint", tmp_path / "out"
    make_model().save_pretrained(checkpoint)
    out.mkdir()
    (out / "config.json").write_text(config)
    (out / "modeling_flash_rnn.py").write_text("")
    assert "out exists and is not an earlier export" in refusal(checkpoint, out)
    assert (out / "config.json").read_text() == config


@pytest.mark.parametrize("kept", [0.999, 0.001, 0])
def test_weights_that_are_cut_off_are_refused(make_model, tmp_path, kept):
    checkpoint = tmp_path / "checkpoint"
    make_model().save_pretrained(checkpoint)
    weights = checkpoint / "model.safetensors"
    os.truncate(weights, int(weights.stat().st_size * kept))
    assert f"{weights} is damaged: " in refusal(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_shards_that_are_missing_are_refused(make_model, tmp_path):
    checkpoint, out = tmp_path / "checkpoint", tmp_path / "out"
    make_model().save_pretrained(checkpoint, max_shard_size="10KB")
    shards = sorted(checkpoint.glob("*.safetensors"))
    assert len(shards) > 1
    export(checkpoint, out)
    shards[-1].rename(tmp_path / shards[-1].name)
    index = checkpoint / "model.safetensors.index.json"
    assert f"{index} names {shards[-1].name}, but there is no such" in refusal(checkpoint, out)
    for text, said in (
        ('{"weight_map": {"a": "../' + shards[-1].name + '"}}', "but there is no such file beside"),
        ("{", "is no index of shards"),
        ('{"weight_map": []}', "is no index of shards"),
    ):
        index.write_text(text)
        assert said in refusal(checkpoint, out)
    assert (out / shards[-1].name).is_file(), "the earlier export is lost"


def test_an_export_that_cannot_be_written_leaves_the_earlier_one(make_model, tmp_path):
    checkpoint, out = tmp_path / "checkpoint", tmp_path / "out/exported"
    make_model().save_pretrained(checkpoint)
    export(checkpoint, out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    done = run_export(checkpoint, out, preexec_fn=limit)
    assert done.returncode == 1
    assert "cannot be written: File too large" in done.stderr
    assert "Traceback" not in done.stderr
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert list(out.parent.iterdir()) == [out]
