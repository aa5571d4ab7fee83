"""Tests that kernels are loaded complete and as locked, or that the loader says what is wrong."""

import importlib.util
import os
import py_compile
import signal
import threading
from pathlib import Path

import pytest

pytestmark = pytest.mark.hub
AUTO, CPU = {"backend": "auto"}, {"backend": "cpu"}


def test_fetches_once_then_needs_no_hub(chain):
    (first,) = chain.load()
    assert (first["source"], first["value"], first["warnings"]) == ("hub", 2.0, [])
    assert first["file"] == str(chain.cached / "__init__.py")
    chain.hub.requests.clear()
    assert same(chain.load(AUTO)[0], first)
    assert chain.hub.requests == []
    chain.hub.stop()
    try:
        assert same(chain.load(CPU, HF_HUB_OFFLINE=1)[0], first)
    finally:
        chain.hub.start()


def test_people_without_flashcell_load_it_too(chain):
    # Without `backend`, kernels takes what torch was compiled for, also where there is no GPU.
    run = "import kernels\ntoy = kernels.get_kernel('flashcell/fused-rnn', version=1, backend='cpu')\n"
    (outcome,) = chain.load({"run": run + "assert toy.lstm(3) == 6"})
    assert outcome["source"] == "hub"


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_loads_while_dynamo_traces(chain, backend):
    (outcome,) = chain.load({"compile": backend})
    assert (outcome["source"], outcome["value"]) == ("hub", 2.0)


def test_eight_processes_share_a_cold_cache(chain):
    running = [chain.start(CPU) for _ in range(8)]
    outcomes = [process.finish()[0] for process in running]
    assert [outcome.get("source") for outcome in outcomes] == ["hub"] * 8, outcomes
    assert len(chain.downloads()) == len(set(chain.downloads())), "a file was sent twice"


def test_eight_processes_survive_a_truncated_download(chain):
    chain.hub.faults.shorten["cells.py"] = 1
    running = [chain.start(CPU) for _ in range(8)]
    outcomes = [process.finish()[0] for process in running]
    assert [outcome.get("source") for outcome in outcomes] == ["hub"] * 8, outcomes


@pytest.mark.parametrize("fault", ["cut", "clip", "shorten"])
def test_truncated_download_is_repeated(chain, fault):
    getattr(chain.hub.faults, fault)["cells.py"] = 1
    (outcome,) = chain.load(CPU)
    assert outcome["source"] == "hub"
    assert chain.downloads().count("cells.py") == 2


def test_download_that_stays_truncated_is_refused(chain):
    chain.hub.faults.shorten["cells.py"] = 99
    assert_corrupt(chain.load(AUTO, CPU), "cells.py has sha256")
    # Twice each: files that fail the check are not stored.
    assert chain.downloads().count("cells.py") == 4
    assert not (chain.cached / "cells.py").exists()


def test_interrupted_download_is_taken_up(chain):
    asked, go, apply = threading.Event(), threading.Event(), chain.hub.faults.apply

    def wait(method: str, path: str, content: bytes) -> tuple[bytes, int]:
        if path.endswith(".so"):
            asked.set()
            go.wait(60)
        return apply(method, path, content)

    chain.hub.faults.apply = wait
    process = chain.start(CPU)
    assert asked.wait(60)
    os.kill(process.pid, signal.SIGKILL)
    go.set()
    assert chain.load(CPU)[0]["source"] == "hub"
    assert not process.out.exists()
    assert {path.name for path in chain.cached.iterdir()} == set(lock_entry(chain)["files"])


def test_ctrl_c_while_a_file_is_stored(chain):
    run = """
import os, pytest
from flat.hub import kernel_loader
def interrupted(file):
    os.fsync = fsync
    raise KeyboardInterrupt
fsync, os.fsync = os.fsync, interrupted
with pytest.raises(KeyboardInterrupt):
    kernel_loader.load_kernel("fused-rnn", "cpu", "cpu")
"""
    assert chain.load(CPU | {"run": run})[0]["value"] == 2.0
    assert {p.name for p in chain.cached.iterdir()} == set(lock_entry(chain)["files"])


def test_tampered_on_the_hub_is_refused(chain, tmp_path):
    chain.hub.faults.tampered["cells.py"] = spy(tmp_path).encode()
    outcomes = chain.load(AUTO, CPU)
    assert_corrupt(outcomes, "cells.py has sha256", "expected", "was not imported")
    assert not (tmp_path / "imported").exists()


def test_tampered_in_the_cache_is_refused(chain, tmp_path):
    chain.load()
    chain.hub.requests.clear()
    cells, extra = chain.cached / "cells.py", chain.cached / "cells"
    text, blob = cells.read_text(), cells.resolve()

    blob.write_text(spy(tmp_path) + text)
    assert_corrupt(chain.load(AUTO, CPU), f"{chain.cached} ", "cells.py has sha256")
    blob.write_text(text)

    extra.mkdir()
    # Python would prefer the package to the module.
    (extra / "__init__.py").write_text(spy(tmp_path) + text)
    assert chain.load()[0]["value"] == 2.0
    extra.rename(tmp_path / "cells")
    extra.symlink_to(tmp_path / "cells")
    assert chain.load()[0]["value"] == 2.0
    assert not (tmp_path / "imported").exists()
    assert chain.hub.requests == []  # a download did not hide the wrong file


def test_bytecode_in_the_cache_is_not_read(chain, tmp_path):
    chain.load()
    evil = tmp_path / "evil.py"
    evil.write_text("def lstm(x):\n    return 3 * x\n")
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    file = importlib.util.cache_from_source(str(chain.cached / "cells.py"))
    py_compile.compile(str(evil), file, doraise=True, invalidation_mode=mode)
    assert chain.load()[0]["value"] == 2.0


def test_missing_file_is_fetched_again(chain):
    chain.load()
    (chain.cached / "cells.py").unlink()
    assert chain.load()[0]["source"] == "hub"


def test_no_hub_and_no_cache(chain):
    chain.hub.stop()
    try:
        auto, again, explicit, reference = chain.load(AUTO, AUTO, CPU, {"backend": "reference"})
        (offline,) = chain.load(CPU, HF_HUB_OFFLINE=1)
    finally:
        chain.hub.start()
    assert [auto["source"], again["source"], reference["source"]] == ["reference"] * 3
    (warning,) = auto["warnings"] + again["warnings"] + reference["warnings"]
    assert "runs as the torch reference" in warning
    assert "not in the cache and cannot be fetched" in warning
    assert "Connection refused" in warning
    assert "not in the cache" in auto["info"]
    for outcome in (explicit, offline):
        assert outcome["error"] == "KernelUnavailable"
        assert "not in the cache and cannot be fetched" in outcome["message"]


def test_revision_is_not_on_the_hub(chain):
    chain.edit_lock(revision="0" * 40)
    auto, explicit = chain.load(AUTO, CPU)
    assert auto["source"] == "reference"
    assert explicit["error"] == "KernelUnavailable"
    assert "RevisionNotFound" in explicit["message"]


def test_unpublished(chain):
    chain.edit_lock(revision=None, variants={})
    auto, explicit = chain.load(AUTO, CPU)
    assert auto["source"] == "reference"
    assert ["unpublished" in warning for warning in auto["warnings"]] == [True]
    assert explicit["error"] == "KernelUnavailable"
    assert "LOCAL_KERNELS=flashcell/fused-rnn=" in explicit["message"]
    assert chain.hub.requests == []


def test_no_variant_for_this_machine(chain):
    entry = {
        "id": "_toy",
        "archs": [],
        "files": {"__init__.py": "0" * 64, "metadata.json": "0" * 64},
    }
    names = ["torch-stable-abi299-cpu-x86_64-linux", "torch-stable-abi210-cpu-aarch64-linux"]
    names += ["torch-stable-abi210-cu130-x86_64-linux", "torch-universal"]
    chain.edit_lock(variants=dict.fromkeys(names, entry))
    auto, explicit, mps = chain.load(AUTO, CPU, {"device": "mps"})
    assert auto["source"] == mps["source"] == "reference"
    (warning,) = auto["warnings"]
    assert explicit["error"] == "KernelUnavailable"
    for text in (warning, explicit["message"]):
        assert "this machine needs cpu on linux" in text
        assert "abi299-cpu-x86_64-linux (for torch >= 2.99)" in text
        assert "cpu-aarch64-linux (for linux aarch64)" in text
        assert "cu130-x86_64-linux (for cuda)" in text
        assert "torch-universal (not a build on torch's stable ABI)" in text
    assert chain.hub.requests == []


def test_arguments_that_cannot_be(chain):
    wrong, elsewhere, index = chain.load(
        {"backend": "triton"}, {"backend": "cuda"}, {"device": "cpu:0"}
    )
    assert wrong["error"] == elsewhere["error"] == index["error"] == "ValueError"
    assert "device_type is 'cpu:0', but must be a type such as 'cuda'" in index["message"]
    assert "must be one of auto, cuda, cpu, reference" in wrong["message"]
    assert "backend is 'cuda', but the tensors are on 'cpu'" in elsewhere["message"]


def test_lock_of_another_build(chain):
    entry = lock_entry(chain)
    chain.edit_lock(variants={chain.variant: entry | {"id": "_other_kernel"}})
    assert_corrupt(chain.load(AUTO, CPU), "metadata.json has id", "expected '_other_kernel'")
    files = dict(entry["files"])
    files["__init__.py"], files["cells.py"] = files["cells.py"], files["__init__.py"]
    chain.edit_lock(variants={chain.variant: entry | {"files": files}})
    assert_corrupt(chain.load(AUTO), "__init__.py has sha256")
    more = entry["files"] | {"more.py": "0" * 64}
    chain.edit_lock(variants={chain.variant: entry | {"files": more}})
    (outcome,) = chain.load(CPU)
    assert outcome["error"] == "KernelUnavailable"
    assert "cannot be fetched (more.py: 404 EntryNotFound)" in outcome["message"]


def test_lock_that_is_none(chain):
    outcomes = chain.load(AUTO, CPU, FLASHCELL_LOCK=chain.folder / "absent.py")
    assert [o["error"] for o in outcomes] == ["LockError"] * 2
    assert "absent.py cannot be read: No such file or directory" in outcomes[0]["message"]


def test_same_kernel_imported_from_elsewhere(chain, project):
    path = project.root / "build" / chain.variant
    run = f"from pathlib import Path; import kernels; kernels.get_local_kernel(Path({str(path)!r}))"
    (same,) = chain.load(CPU | {"run": run})
    assert (same["source"], same["value"]) == ("hub", 2.0)
    (path / "cells.py").write_text("def lstm(x):\n    return 5 * x\n")
    assert_corrupt(chain.load(CPU | {"run": run}), "was imported from", "cells.py has sha256")


def same(one: dict, other: dict) -> bool:
    return one | {"seconds": 0} == other | {"seconds": 0}


def lock_entry(chain) -> dict:
    from flashcell.hub.lock_format import read_lock

    return read_lock(chain.folder / "lock.py")["kernels"]["fused-rnn"]["variants"][chain.variant]


def spy(folder: Path) -> str:
    return f"open({str(folder / 'imported')!r}, 'w')\n"


def assert_corrupt(outcomes: list[dict], *words: str) -> None:
    for outcome in outcomes:
        assert outcome.get("error") == "KernelCorrupt", outcome
        assert all(word in outcome["message"] for word in words), outcome["message"]
