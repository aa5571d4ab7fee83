"""Tests LOCAL_KERNELS, which names builds on this machine: they win, and are not replaced by others."""

import pytest

pytestmark = pytest.mark.hub
AUTO, CPU = {"backend": "auto"}, {"backend": "cpu"}


def test_local_kernels_win(chain, project):
    path = project.root / "build" / chain.variant
    # Digests are not checked for local kernels.
    (path / "cells.py").write_text("def lstm(x):\n    return 5 * x\n")
    for root in (project.root, project.root / "build", path):
        (outcome,) = chain.load(
            CPU, LOCAL_KERNELS=f"other/kernel=/nowhere:flashcell/fused-rnn={root}"
        )
        assert (outcome["source"], outcome["value"]) == ("local", 5.0)
    assert chain.hub.requests == []


def test_local_kernels_do_not_fall_back(chain, project, tmp_path):
    wish = "LOCAL_KERNELS"
    ours = "flashcell/fused-rnn"
    (tmp_path / "file").touch()
    wrong = {
        f"{ours}={tmp_path / 'nothing'}": "nothing for flashcell/fused-rnn, but it does not exist",
        f"{ours}={tmp_path / 'file'}": "file for flashcell/fused-rnn, but it is no directory",
        f"{ours}={tmp_path}": "no variant at all",
        f"{ours}={project.root}:{ours}={tmp_path}": f"names {ours} 2 times",
        f"flashcell/fused_rnn={project.root}": "names 'flashcell/fused_rnn', but must name flashcell/",
        f" {ours}={project.root}": "names ' flashcell/fused-rnn', but must name flashcell/",
    }
    malformed = ("/a/path", "=/a/path", f"{ours}=", "=")
    wrong |= {entry: f"LOCAL_KERNELS has '{entry}', but must be" for entry in malformed}
    for entries, message in wrong.items():
        (outcome,) = chain.load(AUTO, **{wish: entries})
        assert outcome["error"] == "KernelError"
        assert message in outcome["message"]
    metadata = project.root / "build" / chain.variant / "metadata.json"
    whole = metadata.read_text()
    for text, reason in ((whole[:20], "JSONDecodeError"), ("[]", "TypeError"), ("{}", "KeyError")):
        metadata.write_text(text)
        (damaged,) = chain.load(AUTO, **{wish: f"flashcell/fused-rnn={project.root}"})
        assert damaged["error"] == "KernelError"
        assert f"builds in {project.root} cannot be read ({reason}" in damaged["message"]
    metadata.write_text(whole)
    (project.root / "build" / chain.variant / "cells.py").write_text("raise OSError('broken')")
    (broken,) = chain.load(AUTO, **{wish: f"flashcell/fused-rnn={project.root}"})
    assert broken["error"] == "KernelError"
    assert "cannot be imported (OSError: broken)" in broken["message"]
