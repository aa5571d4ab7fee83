"""Programs that never import flashcell load what it has saved, and the checkpoints that it ships."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from flashcell import FlashMLSTMConfig, FlashRNNConfig, FlashXLSTMConfig
from model_cases import cpu_only, kinds

pytestmark = cpu_only
ROOT = Path(__file__).resolve().parents[2]
SHIPPED = sorted(file.parent for file in ROOT.glob("model_cards/*/config.json"))
STOCK = """
import json, sys
import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

sums = []
for folder in sys.argv[1:]:
    options = {"trust_remote_code": True}
    model = AutoModelForCausalLM.from_pretrained(folder, **options).eval()
    for auto in (AutoModel, AutoModelForSequenceClassification, AutoModelForTokenClassification):
        auto.from_pretrained(folder, **options)
    sums.append(model(torch.arange(8)[None]).logits.sum().item())
    model.save_pretrained(f"again-{len(sums)}")
print(json.dumps(sums))
"""


def load_stock(place: Path, *folders: Path) -> list[float]:
    environment = {**os.environ, "HF_HOME": str(place / "home"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", STOCK, *folders],
        capture_output=True, text=True, env=environment, cwd=place,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_stock_programs_load_what_is_saved_and_what_ships(make_model, tmp_path):
    folders, want = list(SHIPPED), []
    assert folders
    for case in kinds():
        make_model(case).save_pretrained(tmp_path / case)
        folders.append(tmp_path / case)
    for folder in folders:
        model = AutoModelForCausalLM.from_pretrained(folder).eval()
        want.append(model(torch.arange(8)[None]).logits.sum().item())
    assert load_stock(tmp_path, *folders) == want
    again = [tmp_path / f"again-{number + 1}" for number in range(len(folders))]
    assert all(not list(folder.glob("configuration*.py")) for folder in again)
    assert load_stock(tmp_path, *again) == want


@pytest.mark.parametrize("folder", SHIPPED, ids=lambda folder: folder.name)
def test_shipped_checkpoints_have_the_present_loader(folder, tmp_path):
    AutoModelForCausalLM.from_pretrained(folder).config.save_pretrained(tmp_path)
    name = "flashcell_code.py"
    assert (folder / name).read_text() == (tmp_path / name).read_text()
    key = "auto_map"
    saved = json.loads((tmp_path / "config.json").read_text())
    assert json.loads((folder / "config.json").read_text())[key] == saved[key]


@pytest.mark.parametrize("kind", [FlashRNNConfig, FlashMLSTMConfig, FlashXLSTMConfig])
def test_every_configuration_has_an_auto_map(kind, tmp_path):
    """trl reads it; an empty one is never saved, and no two configurations share it."""
    config = kind()
    assert config.auto_map == {}
    assert "auto_map" not in config.to_json_string()
    assert config == kind()
    config.save_pretrained(tmp_path)
    assert config.auto_map["AutoConfig"] == f"flashcell_code.{kind.__name__}"
    assert kind().auto_map == kind(auto_map=None).auto_map == {}
    again = kind.from_pretrained(tmp_path)
    assert again.auto_map == config.auto_map


def test_code_of_somebody_else_is_kept_if_it_is_there(tmp_path):
    (tmp_path / "mine.py").write_text("")
    config = FlashRNNConfig(
        auto_map={"AutoModelForCausalLM": "mine.Model", "AutoModel": "modeling_flash_rnn.Gone"}
    )
    config.save_pretrained(tmp_path)
    assert config.auto_map["AutoModelForCausalLM"] == "mine.Model"
    assert config.auto_map["AutoModel"] == "flashcell_code.FlashRNNModel"


class OwnConfig(FlashRNNConfig):
    model_type = "flash_rnn"


def test_a_users_own_configuration_is_left_alone(tmp_path):
    OwnConfig().save_pretrained(tmp_path)
    assert not (tmp_path / "flashcell_code.py").exists()
    assert "auto_map" not in (tmp_path / "config.json").read_text()


def test_a_folder_that_is_a_file_is_refused_as_ever(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(AssertionError, match="should be a directory, not a file"):
        FlashRNNConfig().save_pretrained(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"
