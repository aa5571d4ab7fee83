"""Runs scripts/train as on GPUs, sharded by FSDP2, but on the CPU, where accelerate can shard
although it refuses to start. With BY_BLOCKS in the environment a small model is sharded as a
large one is."""

import argparse
import os
import runpy
import sys
from pathlib import Path

from accelerate import state
from accelerate.utils import DistributedType

TRAIN = Path(__file__).resolve().parents[2] / "scripts/train"
begin, error = state.AcceleratorState.__init__, argparse.ArgumentParser.error


def begin_sharded(self, *args, fsdp_plugin=None, **kwargs):
    begin(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
    if fsdp_plugin is not None:
        self.fsdp_plugin = fsdp_plugin
        self.distributed_type = DistributedType.FSDP
        state.PartialState._shared_state["distributed_type"] = DistributedType.FSDP


def accept(self, message):
    if "--strategy fsdp2 needs --device cuda" not in message:
        error(self, message)


state.AcceleratorState.__init__ = begin_sharded
argparse.ArgumentParser.error = accept
sys.argv[0] = str(TRAIN)
if "BY_BLOCKS" in os.environ:
    from training import step

    step.ONE_UNIT = 0
runpy.run_path(str(TRAIN), run_name="__main__")
