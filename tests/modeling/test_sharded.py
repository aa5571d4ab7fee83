"""Tests FSDP and tensor parallelism as transformers runs them, with two processes on the CPU."""

import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from transformers.distributed import DistributedConfig

from model_cases import cpu_only, kinds

can_shard = "fsdp_size" in {field.name for field in fields(DistributedConfig)}


@cpu_only
@pytest.mark.skipif(not can_shard, reason="this transformers shards through accelerate alone")
def test_sharded_models_are_whole_ones(make_model, tmp_path):
    for case in kinds():
        make_model(case, vocab_size=64).save_pretrained(tmp_path / case)
    tied = make_model("flash_mlstm", vocab_size=64, tie_word_embeddings=True)
    tied.save_pretrained(tmp_path / "flash_mlstm-tied")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    worker = Path(__file__).with_name("sharded_worker.py")
    done = subprocess.run(
        [*launch, worker, tmp_path], capture_output=True, text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
