"""The list of variants that `kernels` asks for, and what the report says of those that are there."""

import shutil

import pytest
from kernels.variants import VariantAccepted, parse_variant

from releasing import compliance

X86 = "torch-stable-abi210-{}-x86_64-linux"


def test_what_is_asked_for():
    wanted = compliance.asked("2.10")
    cuda = {"cu126", "cu128", "cu130", "cu132"}
    assert set(wanted["cuda", "x86_64-linux"]) == set(wanted["cuda", "aarch64-linux"]) == cuda
    assert wanted["cuda", "x86_64-linux"]["cu128"] == ["2.10", "2.11"]
    assert wanted["cpu", "x86_64-linux"] == {"cpu": list(compliance.ASKED)}
    assert ("metal", "x86_64-linux") not in wanted
    assert "cu128" not in compliance.asked("2.12")["cuda", "x86_64-linux"]
    assert compliance.promised_torch() == "2.10"
    for (_, system), tags in wanted.items():  # names that kernels' own loader understands
        for tag in tags:
            assert parse_variant(f"torch-stable-abi210-{tag}-{system}").arch.os in system


@pytest.mark.parametrize(
    ("variant", "there", "said"),
    [
        (X86.format("cpu"), ["cpu"], "built"),
        (X86.format("cpu"), ["cu130"], "missing"),
        (X86.format("cu132"), ["cu126", "cu130"], "by cu130"),
        (X86.format("cu130"), ["cu132"], "missing"),
        (X86.format("cu130"), ["cu128"], "missing"),
        ("torch-stable-abi210-cu132-aarch64-linux", ["cu130"], "missing"),
        ("torch-stable-abi210-metal-aarch64-darwin", ["cpu"], "missing"),
    ],
)
def test_what_stands_for_a_variant(variant, there, said):
    found = {X86.format(tag): compliance.HERE for tag in there}
    assert compliance.standing(variant, found) == said


def test_the_loader_of_kernels_takes_what_the_report_says():
    """kernels' own resolver, told the machine, against `standing`."""
    from kernels import variants
    from kernels.backends import parse_backend
    from packaging.version import Version

    there = {X86.format(tag): compliance.HERE for tag in ("cpu", "cu126", "cu130")}
    parsed = [parse_variant(name) for name in there]
    for tags in compliance.asked("2.10").values():
        for tag, torches in tags.items():
            if not tag.startswith(("cpu", "cu")):
                continue
            for torch in torches:
                trace = variants._check_variants(
                    parsed, parse_backend(tag), "x86_64", "linux", Version(torch), True, None
                )
                taken = {d.variant.variant_str for d in trace if isinstance(d, VariantAccepted)}
                said = compliance.standing(X86.format(tag), there)
                assert bool(taken) == (said != "missing")
                if said.startswith("by "):
                    assert X86.format(said.removeprefix("by ")) in taken
                    assert X86.format(tag) not in taken


def test_the_report(project, publish_kernels, tmp_path, capsys, monkeypatch):
    project.publish(monkeypatch, "--compliance", "--lock", tmp_path / "lock.py")
    page = capsys.readouterr().out
    assert "variants that `kernels` asks for with torch 2.10 to " in page
    sections = dict(s.split(":", 1) for s in page.split("\n\n")[1:-1])
    assert sections["cpu x86_64-linux"].startswith(" compliant\n")
    assert sections["cuda x86_64-linux"].startswith(" nothing is there\n")
    assert not (tmp_path / "lock.py").exists()
    (project.root / "torch-ext/fused_rnn/cells.py").write_text("def lstm(x):\n    return 7 * x\n")
    project.publish(monkeypatch, "--compliance", "--lock", tmp_path / "lock.py")
    assert "cpu x86_64-linux: nothing is there" in capsys.readouterr().out  # of other sources


def test_a_pinned_variant_counts(project, hub, tmp_path, capsys, monkeypatch):
    lock = ("--lock", tmp_path / "lock.py")
    project.publish(monkeypatch, "--endpoint", hub.url, *lock)
    shutil.rmtree(project.root / "build")
    project.publish(monkeypatch, "--compliance", *lock)
    page = capsys.readouterr().out
    assert "cpu x86_64-linux: compliant" in page
    assert "published" in page
