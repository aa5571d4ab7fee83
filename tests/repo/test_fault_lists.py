"""Tests that the faults of scripts/mutate can be put into the code as it is today."""

from pathlib import Path

import pytest

try:
    import tomllib
except ImportError:  # Python 3.10 has no tomllib; pytest installs tomli
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
LISTS = sorted((ROOT / "scripts/mutation").glob("*.toml"))


@pytest.mark.parametrize("path", LISTS, ids=lambda path: path.stem)
def test_every_fault_has_one_place_and_tests(path):
    faults = tomllib.loads(path.read_text(encoding="utf-8"))["fault"]
    assert faults
    for fault in faults:
        code = (ROOT / fault["file"]).read_text(encoding="utf-8")
        times = code.count(fault["old"])
        assert times == 1, f"{fault['name']}: `old` stands {times} times in {fault['file']}"
        assert fault["new"] != fault["old"], fault["name"]
        files = [t.partition("::")[0] for t in fault["tests"] if t.startswith("tests/")]
        assert files, f"{fault['name']}: no test"
        absent = [file for file in files if not (ROOT / file).exists()]
        assert not absent, f"{fault['name']}: there is no {', '.join(absent)}"
