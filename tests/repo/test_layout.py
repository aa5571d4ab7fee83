"""Tests that repo_checks/layout.py finds what is planted in small trees; test_check_repo.py uses the
whole one."""

import pytest

from repo_checks import layout

PROJECT = (
    '[tool.setuptools.package-dir]\n"flashcell" = "modeling"\n"flashcell.hub" = "modeling/hub"\n'
)
# In two parts, so that the rule that looks for edits of sys.path does not find this file.
EDIT = "import sys\nsys.path" + ".insert(0, 'x')\n"
TREE = {
    "pyproject.toml": PROJECT,
    "modeling/__init__.py": "from .hub.lock import read\nfrom .model import Model\n",
    "modeling/modeling_flash.py": "from .model import Model\n",
    "modeling/model.py": "from .hub import lock\n",
    "modeling/hub/__init__.py": "",
    "modeling/hub/lock.py": "import json\n",
    "scripts/bench_ops": "from bench import timing\n",
    "scripts/__main__.py": "",
    "scripts/bench/__init__.py": "",
    "scripts/bench/timing.py": "from measurement.record import Row\n",
    "scripts/measurement/record.py": "from flashcell import Model\n",
    "tests/ops/tfla/test_cuda.py": "assert sys.path" + " == before\n",
    **{f"tests/ops/test_{i}.py": "" for i in range(30)},
    **{f"scripts/results/{i}.csv": "" for i in range(30)},
    "a.py": EDIT,
    "b.py": EDIT.replace(".insert(0, 'x')", "[:0] = ['x']"),
}
PLANTED = {
    "prefix of a folder": (
        {"tests/ops/tfla/test_tfla_cuda.py": ""},
        "test_tfla_cuda.py: begins with the folder tfla",
    ),
    "prefix with a hyphen": ({"fused-rnn/fused_rnn_plan.h": ""}, "begins with the folder fused-rnn"),
    "prefix of a folder above": ({"scripts/bench/ops/bench_cpu.py": ""}, "begins with the folder bench"),
    "prefix of a folder beside it": ({"modeling/hub_files.py": ""}, "begins with the folder hub"),
    "module among the commands": ({"scripts/timing.py": ""}, "scripts/timing.py: is no command"),
    "private module": ({"scripts/bench/_timing.py": ""}, "scripts/bench/_timing.py: begins with _"),
    "third editor of sys.path": (
        {"c.py": EDIT.replace(".insert(0, ", ".append(")},
        "a.py, b.py, c.py: edit sys.path, but at most 2",
    ),
    "edit in a program of a string": (
        {"c.py": f"CODE = {EDIT!r}\n"},
        "a.py, b.py, c.py: edit sys.path, but at most 2",
    ),
    "large folder": (
        {f"modeling/hub/{name}.py": "" for name in "abcdefghijklmno"},
        "modeling/hub: has 16 files, but at most 15",
    ),
    "circle of files": (
        {"modeling/hub/lock.py": "def read():\n    from ..model import Model\n"},
        "modeling/hub/lock.py -> modeling/model.py -> modeling/hub/lock.py: files import",
    ),
    "circle through an absolute import": (
        {"modeling/hub/lock.py": "import flashcell.model\n"},
        "modeling/hub/lock.py -> modeling/model.py -> modeling/hub/lock.py: files import",
    ),
    "circle of three files": (
        {"scripts/x/a.py": "from x import b", "scripts/x/b.py": "import x.c", "scripts/x/c.py": "import x.a"},
        "scripts/x/a.py -> scripts/x/b.py -> scripts/x/c.py -> scripts/x/a.py: files import",
    ),
    "circle of folders": (
        {"scripts/measurement/hardware.py": "from bench import timing\n"},
        "scripts/bench -> scripts/measurement -> scripts/bench: folders import",
    ),
}  # fmt: skip


def violations(tree: dict[str, str]) -> list[str]:
    return list(layout.violations(tuple(tree), tree.get))


def test_a_sound_tree_has_none():
    assert violations(TREE) == []


@pytest.mark.parametrize("name", PLANTED)
def test_it_finds(name):
    planted, expected = PLANTED[name]
    found = violations(TREE | planted)
    assert any(expected in line for line in found), found
