"""Tests a lying Hub, a cache that others write to and swapped files: only what is locked may run."""

import ast
import json
import os
import shutil
from pathlib import Path

import pytest

from flashcell.hub.lock_format import read_lock

pytestmark = pytest.mark.hub
ROOT = Path(__file__).resolve().parents[2]
CPU, AUTO = {"backend": "cpu"}, {"backend": "auto"}
IN_CONSTRUCTOR = """
#include <stdio.h>
__attribute__((constructor)) static void run(void) { fclose(fopen("%s", "w")); }
"""
# Once {target} has been opened, {swap} runs before the process opens or imports anything else.
SWAP = """
import os, shutil, sys
seen = []
def hook(event, arguments):
    if event not in ("open", "import", "exec", "compile") or len(seen) > 1:
        return
    if event == "open" and os.path.basename(str(arguments[0])) == {target!r} and not seen:
        seen.append("opened")
    elif seen and not str(arguments[0]).endswith({target!r}):
        seen.append("swapped")
        {swap}
sys.addaudithook(hook)
"""


@pytest.fixture
def spy(tmp_path):
    """A file that forbidden code would create, and the Python code that creates it."""
    file = tmp_path / "ran"
    yield file, f"open({str(file)!r}, 'w')\n"
    assert not file.exists()


def locked(chain) -> dict:
    lock = read_lock(chain.folder / "lock.py")["kernels"]["fused-rnn"]
    return lock | lock["variants"][chain.variant]


def library(chain) -> str:
    return f"{locked(chain)['id']}.abi3.so"


def on_hub(chain, edit) -> None:
    """Changes what the Hub reports of its files, name -> {sha256, size, oid}, at the same commit."""
    file = chain.folder / "store/repos/flashcell/fused-rnn.json"
    state = json.loads(file.read_text())
    edit(state["commits"][locked(chain)["revision"]]["files"])
    file.write_text(json.dumps(state))


def flipped(content: bytes) -> bytes:
    at = len(content) // 2
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


@pytest.mark.parametrize("where", ["cache", "Hub"])
def test_a_flipped_bit_of_the_library_is_refused(chain, where):
    name = library(chain)
    chain.load()
    blob = (chain.cached / name).resolve()
    if where == "Hub":
        chain.hub.faults.tampered[name] = flipped(blob.read_bytes())
        blob.unlink()
    else:
        blob.write_bytes(flipped(blob.read_bytes()))
    for outcome in chain.load(AUTO, CPU):
        assert outcome.get("error") == "KernelCorrupt", outcome
        assert f"{name} has sha256" in outcome["message"]


def test_only_locked_names_are_asked_for(chain, spy):
    names = ["__pycache__/cells.cpython-311.pyc", "cells/__init__.py", "sitecustomize.py", "x.pth"]
    stored = chain.hub.store.put(spy[1].encode())
    more = {f"build/{chain.variant}/{name}": stored for name in names}
    on_hub(chain, lambda files: files.update(more))
    assert chain.load()[0]["value"] == 2.0
    assert {p.name for p in chain.cached.iterdir()} == set(locked(chain)["files"])
    assert set(chain.downloads()) == set(locked(chain)["files"])
    assert len(chain.hub.requests) == len(locked(chain)["files"])  # and no other requests


@pytest.mark.parametrize("etag", ["{victim}", "../../../../../../victim", "..", "a/b", "", "/"])
def test_what_the_hub_calls_a_file_names_no_place(chain, tmp_path, etag):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    name = f"build/{chain.variant}/cells.py"
    on_hub(chain, lambda files: files[name].update(oid=etag.format(victim=victim)))
    chain.hub.faults.tampered["cells.py"] = b"overwritten"
    assert chain.load(CPU)[0].get("error") == "KernelCorrupt"
    chain.hub.faults.tampered.clear()
    before = outside(chain)
    assert chain.load(CPU)[0]["source"] == "hub"
    assert victim.read_text() == "mine"
    assert outside(chain) == before


def outside(chain) -> set[Path]:
    """The files beside the cache, except those that the tests' own processes write."""
    files = chain.folder.parent.rglob("*")
    return {f for f in files if "cache" not in f.parts and f.suffix not in (".json", ".pyc")}


@pytest.mark.parametrize("linked", ["build", "snapshots", "variant", "locks"])
def test_a_link_does_not_lead_out_of_the_cache(chain, tmp_path, linked):
    chain.load()
    victim, at = tmp_path / "victim", chain.cached
    if linked == "locks":
        link = chain.folder / "cache/hub/.locks"
    else:
        link = {"variant": at, "build": at.parent, "snapshots": at.parents[2]}[linked]
    shutil.rmtree(at)
    shutil.rmtree(link, ignore_errors=True)
    victim.mkdir()
    link.symlink_to(victim)
    # It was loaded from memory; the next time it is fetched again.
    assert chain.load(CPU)[0]["source"] == "hub"
    assert list(victim.rglob("*")) == []


@pytest.mark.parametrize("how", ["replaced", "blob replaced", "written"])
@pytest.mark.parametrize("target", ["cells.py", "library"])
def test_a_file_swapped_after_the_check_does_not_run(chain, project, spy, target, how):
    """The swap happens right after the file was read, whatever is opened or imported next."""
    chain.load()
    name = library(chain) if target == "library" else target
    evil = project.root / "evil"
    if target == "library":
        shutil.copy(project.build(IN_CONSTRUCTOR % spy[0]) / name, evil)
    else:
        evil.write_text(spy[1] + "def lstm(x):\n    return 3 * x\n")
    file = chain.cached / name
    file = file.resolve() if how == "blob replaced" else file
    put = "shutil.copyfile" if how == "written" else "os.replace"
    swap = f"{put}({str(evil)!r}, {str(file)!r})"
    (outcome,) = chain.load(CPU | {"run": SWAP.format(target=file.name, swap=swap)})
    assert outcome["value"] == 2.0
    assert how != "written" or file.read_bytes() == evil.read_bytes()
    assert how == "written" or not evil.exists()


def test_every_module_is_imported_at_the_load(chain, spy):
    """The test kernel's modules are all imported at the load, so its files may change later."""
    run = f"import sys; module = sys.modules[{locked(chain)['id']!r}]\n"
    run += "assert module.__path__ == [] and module.late.VALUE == 1"
    store, files = chain.hub.store, locked(chain)["files"]
    late = store.put(b"VALUE = 1\n")
    on_hub(chain, lambda f: f.update({f"build/{chain.variant}/late.py": late}))
    entry = read_lock(chain.folder / "lock.py")["kernels"]["fused-rnn"]["variants"][chain.variant]
    more = {chain.variant: entry | {"files": files | {"late.py": late["sha256"]}}}
    chain.edit_lock(variants=more)
    first, second = chain.load(CPU, AUTO | {"run": run})
    assert (first["source"], second["source"]) == ("hub", "hub")


@pytest.mark.parametrize("kernel", ["diagonal-rnn", "fused-rnn", "tfla"])
def test_no_kernel_imports_when_it_is_called(kernel):
    """A late import would read from a disk that nobody verifies by then."""
    sources = sorted((ROOT / "kernel_builds" / kernel / "torch-ext").rglob("*.py"))
    assert sources
    for source in sources:
        for function in ast.walk(ast.parse(source.read_text())):
            if isinstance(function, (ast.FunctionDef, ast.Lambda, ast.AsyncFunctionDef)):
                inner = ast.walk(function)
                late = [n for n in inner if isinstance(n, (ast.Import, ast.ImportFrom))]
                assert not late, f"{source}:{late[0].lineno}"


def test_modules_of_the_same_name_elsewhere_are_not_taken(chain, spy, tmp_path):
    names = ["fused_rnn", "cells", "_ops", "toy", locked(chain)["id"], "newton", "sitecustomize"]
    (tmp_path / "path").mkdir()
    for name in names:
        (tmp_path / f"path/{name}.py").write_text(spy[1])
    (outcome,) = chain.load(CPU | {"path": str(tmp_path / "path")})
    assert (outcome["source"], outcome["value"]) == ("hub", 2.0)


@pytest.mark.parametrize("text", ["", ":", "::", "a/b=/nowhere:", ":a/b=/nowhere"])
def test_empty_entries_of_local_kernels(chain, project, text):
    assert chain.load(CPU, LOCAL_KERNELS=text)[0]["source"] == "hub"
    entry = f"flashcell/fused-rnn={project.root}"
    for entries in (f"{text}:{entry}", f"{entry}:{text}"):
        assert chain.load(CPU, LOCAL_KERNELS=entries)[0]["source"] == "local"


NO_FOLDER = "import tempfile; tempfile.tempdir = '/nowhere'\n"
NO_MEMORY = "import os; del os.memfd_create\n"


@pytest.mark.parametrize("backend", ["auto", "cpu"])
def test_no_folder_for_temporary_files(chain, backend):
    chain.load()
    (outcome,) = chain.load({"backend": backend, "run": NO_FOLDER})
    assert outcome["source"] == "hub"


def test_no_file_in_memory(chain):
    assert chain.load(CPU | {"run": NO_MEMORY})[0]["source"] == "hub"
    (neither,) = chain.load(CPU | {"run": NO_MEMORY + NO_FOLDER})
    assert neither["error"] == "KernelUnavailable"
    assert "cannot be loaded: no memfd_create; " in neither["message"]
    assert "/nowhere" in neither["message"]


def test_a_cache_that_cannot_be_written(chain):
    (chain.folder / "file").touch()
    (outcome,) = chain.load(CPU, HF_HUB_CACHE=chain.folder / "file/cache")
    assert (outcome["source"], outcome["value"]) == ("hub", 2.0)


@pytest.mark.parametrize("kind", ["a FIFO", "a folder", "a link to itself", "a device", "secret"])
def test_a_cached_file_that_cannot_be_read(chain, kind):
    chain.load()
    for name in ("cells.py", library(chain), "metadata.json"):
        file = chain.cached / name
        file.rename(file.with_suffix(".kept"))
        make_unreadable(file, kind)
        auto, explicit = chain.load(AUTO, CPU)
        file.rmdir() if kind == "a folder" else file.unlink()
        file.with_suffix(".kept").rename(file)
        assert auto["source"] == "reference"
        assert explicit["error"] == "KernelUnavailable"
        assert f"{file} cannot be read: " in explicit["message"]
        assert auto["seconds"] < 5


def make_unreadable(file: Path, kind: str) -> None:
    if kind == "a FIFO":
        os.mkfifo(file)
    elif kind == "a folder":
        file.mkdir()
    elif kind == "a device":
        file.symlink_to("/dev/zero")
    elif kind == "a link to itself":
        file.symlink_to(file)
    else:
        if os.geteuid() == 0:
            pytest.skip("root reads every file")
        file.touch(mode=0o000)


def test_locks_that_are_a_fifo(chain, tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (outcome,) = chain.load(AUTO, FLASHCELL_LOCK=tmp_path / "fifo")
    assert outcome["error"] == "LockError"
    assert "fifo cannot be read: not a regular file" in outcome["message"]
    chain.load()
    (lock,) = (chain.folder / "cache/hub/.locks").rglob("*.lock")
    lock.unlink()
    os.mkfifo(lock)
    (chain.cached / "cells.py").unlink()
    assert chain.load(CPU)[0]["source"] == "hub"


def test_kernels_still_loads_it_beside_ours(chain, project):
    """kernels' own copy of the same kernel, and another version of it: each op is registered once."""
    path = project.root / "build" / chain.variant
    get = "from pathlib import Path; import kernels\n"
    get += f"toy = kernels.get_local_kernel(Path({str(path)!r})); assert toy.lstm(3) == {{}} * 3\n"
    ours, same = chain.load(CPU, AUTO | {"run": get.format(2)})
    assert ours["value"] == same["value"] == 2.0
    (project.root / "torch-ext/fused_rnn/cells.py").write_text("def lstm(x):\n    return 7 * x\n")
    project.build()
    two = get.format(7) + "import sys\n"
    check = "import sys; assert len([n for n in sys.modules if n.startswith('_fused_rnn_cpu')"
    check += " and '.' not in n]) == 2"
    for steps in ((CPU, AUTO | {"run": two}), (CPU | {"run": two}, AUTO | {"run": check})):
        assert [o["value"] for o in chain.load(*steps)] == [2.0, 2.0]


def test_the_cache_is_the_one_that_kernels_reads(chain):
    chain.load()
    chain.hub.requests.clear()
    run = "import kernels\nassert kernels.get_kernel("
    run += "'flashcell/fused-rnn', version=1, backend='cpu').lstm(3) == 6"
    assert chain.load({"run": run})[0]["source"] == "hub"
    assert set(chain.downloads()).isdisjoint({"cells.py", library(chain)})
    from huggingface_hub import scan_cache_dir

    report = scan_cache_dir(chain.folder / "cache/hub")
    assert [repo.repo_id for repo in report.repos] == ["flashcell/fused-rnn"]
    assert report.warnings == []
