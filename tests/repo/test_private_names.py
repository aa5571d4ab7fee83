"""repo_checks/private_names.py finds what is planted in a small tree; test_check_repo.py has the whole one."""

import pytest

from repo_checks import private_names

TREE = {
    "modeling/utils/private_names.py": "import torch\nfind = torch._C._get_tracing_state\n",
    "kernel_builds/common/python/private_names.py": "from torch._C import _any\n",
    "modeling/rows.py": (
        "from . import tables\n"
        "from .tables import _count\n"
        "from __future__ import annotations\n"
        "_LIMIT: int = 3\n"
        "class Rows:\n"
        "    _kind = 'row'\n"
        "    def __init__(self):\n"
        "        self._rows, other = [], None\n"
        "    def _add(self, row):\n"
        "        vars(row)['_place'] = len(self._rows)\n"
        "        return self._kind, tables._count(row._rows), row._asdict(), row.__dict__\n"
        "def place(row):\n"
        "    return vars(row)['_place'], getattr(row, '_kind'), '_any_string'\n"
    ),
    "modeling/tables.py": "def _count(rows):\n    return len(rows)\n",
    "modeling/hub/kernel_loader.py": "def f(): ...\nf._dynamo_marked_constant = True\n",
    "scripts/bench/timing.py": "import torch._C\ntorch._C._secret()\n",
    "tests/test_rows.py": "rows._anything\n",
}
PLANTED = {
    "attribute": ("import torch\ntorch.backends._seen\n", "2: uses _seen"),
    "of torch._C": ("import torch\nf = torch._C.f\n", "2: uses _C"),
    "of a library's object": (
        "def f(cache):\n    return cache._is_user_defined\n",
        "2: uses _is_user",
    ),
    "set on a library's object": ("def f(cache):\n    cache._mark = 1\n", "2: uses _mark"),
    "our global's name on another's object": (
        "from .tables import _count\ndef f(x):\n    return x._count\n",
        "3: uses _count",
    ),
    "import of a name": ("from torch import _VF\n", "1: uses _VF"),
    "import from a module": ("from torch._C.guards import Guard\n", "1: uses _C"),
    "import of a module": ("import torch._dynamo.guards as guards\n", "1: uses _dynamo"),
    "in a function": ("def f():\n    from torch.utils._pytree import x\n", "2: uses _pytree"),
    "by getattr": ("x = getattr(object, '_hidden', None)\n", "1: uses _hidden"),
    "by hasattr": ("x = hasattr(object, '_hidden')\n", "1: uses _hidden"),
    "in vars": ("x = vars(object)['_hidden']\n", "1: uses _hidden"),
    "known elsewhere": (
        "def f(g):\n    g._dynamo_marked_constant = True\n",
        "2: uses _dynamo_marked",
    ),
}
PLACES = (
    "modeling/new.py",
    "configuration/new.py",
    "kernel_builds/common/python/new.py",
    "kernel_builds/fused-rnn/torch-ext/fused_rnn/new.py",
)


def violations(tree: dict[str, str]) -> list[str]:
    return list(private_names.violations(tuple(tree), tree.get))


def test_a_sound_tree_has_none():
    assert violations(TREE) == []


@pytest.mark.parametrize("planted", PLANTED)
@pytest.mark.parametrize("place", PLACES)
def test_it_finds(planted, place):
    source, expected = PLANTED[planted]
    found = violations(TREE | {place: source})
    assert any(line.startswith(f"{place}:{expected}") for line in found), found
