"""The GPUs that explain_plan knows, as the planner of the CUDA engines sees them: data."""

import re
from typing import NamedTuple

from .dispatch import shown


class Code(NamedTuple):
    """What kernels were compiled for: code for 8.0 lacks what 9.0 added, also on a GPU of 9.0."""

    arch: int  # 90 for compute capability 9.0
    sm_90a: bool = False  # has the instructions of 9.0 alone: compiled for 9.0a


class Device(NamedTuple):
    """What the plan needs to know of a GPU."""

    name: str
    arch: int  # 90 for compute capability 9.0
    code: Code  # that runs there
    sms: int
    shared_bytes: int  # a thread block may ask for


DEVICES = (  # the first of an arch stands for it; each with code of its own
    Device("A100", 80, Code(80), 108, 166912),
    Device("A40", 86, Code(86), 84, 101376),
    Device("RTX 3090", 86, Code(86), 82, 101376),
    Device("L40S", 89, Code(89), 142, 101376),
    Device("RTX 4090", 89, Code(89), 128, 101376),
    Device("H200", 90, Code(90, sm_90a=True), 132, 232448),
    Device("H100", 90, Code(90, sm_90a=True), 132, 232448),
    Device("B200", 100, Code(100), 148, 232448),
    Device("RTX 5090", 120, Code(120), 170, 101376),
)


def find_device(arch: object) -> Device:
    """'sm_90a', '9.0a', 90 or a GPU's name ('H200', 'NVIDIA A40') -> the device."""
    text = arch.strip() if isinstance(arch, str) else shown(arch)
    digits = text.lower().replace("sm_", "").replace("+ptx", "").replace(".", "").rstrip("af")
    for device in DEVICES:
        if digits == str(device.arch) or device.name.lower() in text.lower():
            return device
    known = sorted({f"sm_{d.arch}" for d in DEVICES}) + [d.name for d in DEVICES]
    raise ValueError(f"arch is {shown(arch)}, but must be one of {', '.join(known)}")


def with_code(device: Device, code: str) -> Device:
    """The device under a library that has no code of its own for it, but runs there: '8.0' on an H200."""
    match = re.fullmatch(r"(\d+)\.(\d)(a?)(\+PTX)?", code) if isinstance(code, str) else None
    if match is not None:
        major, minor, specific, _ = match.groups()
        built = Code(int(major + minor), sm_90a=(major, minor, specific) == ("9", "0", "a"))
        if built.arch == device.arch or (built.arch < device.arch and not specific):
            return device._replace(code=built)
    raise ValueError(f"code is {shown(code)}, but must be an arch that {device.name} runs: '8.0'")
