"""The GPUs that explain_plan knows, with the properties that the planner of the CUDA engines reads."""

import re
from typing import NamedTuple

from .dispatch import shown


class Code(NamedTuple):
    """What a library's kernels were compiled for: code for 8.0 lacks what 9.0 added, on a GPU of
    9.0 too."""

    arch: int  # 90 for compute capability 9.0
    sm_90a: bool = False  # compiled for 9.0a, so it has the instructions that only 9.0a has

    def usable_shared_bytes(self, of_gpu: int) -> int:
        """Returns the shared memory that a thread block may use: code for 7.5 uses no more than a
        GPU of 7.5 has."""
        return min(of_gpu, 65536) if self.arch < 80 else of_gpu


class Device(NamedTuple):
    """The properties of a GPU that the planner reads."""

    name: str
    arch: int  # 90 for compute capability 9.0
    code: Code  # the code that runs on it
    sms: int
    shared_bytes: int  # shared memory that a thread block may use


DEVICES = (  # the first of an arch represents it; with the code that the default build has for it
    Device("T4", 75, Code(75), 40, 65536),
    Device("RTX 2080 Ti", 75, Code(75), 68, 65536),
    Device("A100", 80, Code(80), 108, 166912),
    Device("A40", 86, Code(86), 84, 101376),
    Device("RTX 3090", 86, Code(86), 82, 101376),
    Device("L40S", 89, Code(86), 142, 101376),
    Device("RTX 4090", 89, Code(86), 128, 101376),
    Device("H200", 90, Code(90, sm_90a=True), 132, 232448),
    Device("H100", 90, Code(90, sm_90a=True), 132, 232448),
    Device("B200", 100, Code(100), 148, 232448),
    Device("RTX 5090", 120, Code(120), 170, 101376),
)


def find_device(arch: object) -> Device:
    """Finds a device by arch or name: 'sm_90a', '9.0a', 90, 'H200', 'NVIDIA A40'."""
    text = arch.strip() if isinstance(arch, str) else shown(arch)
    digits = text.lower().replace("sm_", "").replace("+ptx", "").replace(".", "").rstrip("af")
    for device in DEVICES:
        if digits == str(device.arch) or device.name.lower() in text.lower():
            return device
    known = sorted({f"sm_{d.arch}" for d in DEVICES}) + [d.name for d in DEVICES]
    raise ValueError(f"arch is {shown(arch)}, but must be one of {', '.join(known)}")


def with_code(device: Device, code: str) -> Device:
    """Returns the device with a library that has no code for its arch but runs there, as '8.0' on
    an H200."""
    match = re.fullmatch(r"(\d+)\.(\d)(a?)(\+PTX)?", code) if isinstance(code, str) else None
    if match is not None:
        major, minor, specific, _ = match.groups()
        built = Code(int(major + minor), sm_90a=(major, minor, specific) == ("9", "0", "a"))
        if built.arch == device.arch or (built.arch < device.arch and not specific):
            shared_bytes = built.usable_shared_bytes(device.shared_bytes)
            return device._replace(code=built, shared_bytes=shared_bytes)
    raise ValueError(f"code is {shown(code)}, but must be an arch that {device.name} runs: '8.0'")
