"""Tests the emulator alone: it runs a correct kernel, and detects every fault of faults.cu."""

import subprocess

import pytest

from emulate import HERE, SUPPORTED, build_program

pytestmark = pytest.mark.skipif(not SUPPORTED, reason="the emulator needs Linux on x86_64")
WRONG = {  # how the output after the fault's name begins, whatever the order of threads
    "none": "right",
    "no barrier": "wrong",
    "no copy": "wrong",
    "range": "emulator: shared memory: out of range",
    "alignment": "emulator: copy from a misaligned address",
    "divergent lane": "emulator: threads wait for others that never come",
    "divergent kinds": "emulator: lanes of a warp are in different collectives",
    "too much shared": "emulator: 64 threads and 65536 bytes of shared memory, but at most",
}


@pytest.fixture(scope="module")
def faults(tmp_path_factory):
    return build_program(HERE / "faults.cu", tmp_path_factory.mktemp("emulator") / "faults")


@pytest.fixture(scope="module")
def wgmma(tmp_path_factory):
    return build_program(HERE / "products.cu", tmp_path_factory.mktemp("emulator") / "products")


def run(program, options):
    done = subprocess.run(
        [program], env={"FLASHCELL_EMULATOR": options}, capture_output=True, text=True, check=True
    )
    return dict(line.split(": ", 1) for line in done.stdout.splitlines())


@pytest.mark.parametrize("copies", ["", "early"], ids=["late", "early"])
@pytest.mark.parametrize("order", ["", "backwards"], ids=["forwards", "backwards"])
def test_every_fault_is_seen(faults, order, copies):
    said = run(faults, f"{order} {copies}")
    # A copy that landed early hides that it was not waited for, so both orders are run.
    assert said.pop("no wait") == ("right" if copies else "wrong")
    assert said.keys() == WRONG.keys()
    for fault, begin in WRONG.items():
        assert said[fault].startswith(begin), fault


def test_an_unknown_option_is_refused(faults):
    assert "'sideways', but knows backwards, early" in run(faults, "sideways")["none"]


@pytest.mark.parametrize("products", ["", "early"], ids=["late", "early"])
@pytest.mark.parametrize("order", ["", "backwards"], ids=["forwards", "backwards"])
def test_wgmma_multiplies_every_kind_of_operand(wgmma, order, products):
    said = run(wgmma, f"{order} {products}")
    # A product that ran at once hides that it was not waited for, or that an operand was
    # overwritten, so both orders are run.
    assert said.pop("no wait") == said.pop("overwritten") == ("right" if products else "wrong")
    assert said.pop("never arrives").startswith("emulator: threads wait for others that never come")
    assert len(said) == 2 * 6 * 4  # types, operands, widths
    assert {*said.values()} == {"right"}, said
