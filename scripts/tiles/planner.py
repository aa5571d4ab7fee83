"""The planner of csrc/cuda as it stands, compiled with g++: tiles.h may be newer than any build."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

from flashcell.kernels.fused_rnn.explain import Plan, explain_with

BUILDS = Path(__file__).resolve().parents[2] / "kernel_builds"
# Reads the arguments of the op explain_plan from a line, writes the op's text and an empty line.
PROGRAM = r"""
#include <iostream>
#include <string>

#include "cells/all.h"
#include "cuda/explain.h"

using namespace flashcell;

template <typename... Cells>
cuda::CellSizes sizes_of(CellList<Cells...>, const std::string& name) {
  cuda::CellSizes sizes{};
  ((name == Cells::kName ? void(sizes = cuda::kSizesOf<Cells>) : void()), ...);
  return sizes;
}

int main() {
  std::string cell;
  cuda::Problem p{};
  cuda::Device d{};
  int64_t input;
  while (std::cin >> cell >> p.S >> p.T >> p.N >> p.D >> p.io_bytes >> p.tf32 >> d.arch >>
         d.code.arch >> d.code.sm_90a >> d.sms >> d.shared_bytes >> input) {
    const cuda::CellSizes sizes = sizes_of(AllCells(), cell);
    p.gates = sizes.gates, p.aligned = true, p.keeps_state = cuda::batch::keeps_state(sizes);
    std::cout << cuda::explain(sizes, p, input, d) << std::endl;
  }
}
"""


class Planner:
    """A running PROGRAM; it ends when its input does, with the object."""

    def __init__(self) -> None:
        with tempfile.TemporaryDirectory() as work:
            source, program = Path(work) / "planner.cpp", Path(work) / "planner"
            source.write_text(PROGRAM)
            include = [f"-I{BUILDS}", f"-I{BUILDS / 'fused-rnn/csrc'}"]
            subprocess.run(["g++", "-std=c++20", *include, source, "-o", program], check=True)
            process = subprocess.Popen(
                [program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        assert process.stdin is not None
        assert process.stdout is not None
        self._input, self._output = process.stdin, process.stdout

    def __call__(self, *arguments: object) -> str:
        """The text of the op explain_plan."""
        words = (str(int(a) if isinstance(a, bool) else a) for a in arguments)
        self._input.write(" ".join(words) + "\n")
        self._input.flush()
        lines = []
        while (line := self._output.readline()) != "\n":
            if not line:
                raise RuntimeError(f"the planner ended at {arguments}")
            lines.append(line)
        return "".join(lines)

    def explain(self, *call: object, **options: object) -> Plan:
        """Does what a kernel's explain_plan does, with the planner compiled from the sources."""
        return explain_with(self, *call, **options)
