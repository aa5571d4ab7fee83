"""Chooses the variant of a kernel that runs on this machine, or explains why none does.

Our variants are built on torch's stable ABI: torch-stable-abi<torch>-<cpu|cu...>-<machine>-<system>
runs under that torch and every later one, a CUDA variant under every later minor version of its
CUDA. torch-universal and other people's variants are never chosen: the wheel has the reference.
"""

import platform
import re
from collections.abc import Mapping, Sequence

import torch

STABLE_VARIANT = re.compile(r"torch-stable-abi(\d)(\d+)-(cpu|cu(\d+)(\d))-(\w+)-([a-z]+)")


def choose_variant(variants: Mapping[str, Sequence[str]], device_type: str) -> str | None:
    """Returns the best variant for tensors on `device_type`, or None; `variants`: name -> CUDA
    archs."""
    fit = [v for v, archs in variants.items() if unfit(v, archs, device_type) is None]
    return max(fit, key=_preference, default=None)


def explain(variants: Mapping[str, Sequence[str]], device_type: str) -> str:
    """Returns a text that says of each variant why it does not run here."""
    reasons = [f"{v} ({unfit(v, archs, device_type)})" for v, archs in sorted(variants.items())]
    needed = f"{device_type} on {platform.system().lower()} {_cpu()} with torch {torch.__version__}"
    if device_type == "cuda" and torch.cuda.is_available():
        needed += " on a device of capability {}.{}".format(*torch.cuda.get_device_capability())
    return f"this machine needs {needed}; there is {', '.join(reasons) or 'no variant at all'}"


def unfit(variant: str, archs: Sequence[str], device_type: str) -> str | None:
    """Returns why a variant does not run here, or None if it does."""
    match = STABLE_VARIANT.fullmatch(variant)
    if match is None:
        return "not a build on torch's stable ABI"
    torch_major, torch_minor, backend, cuda_major, cuda_minor, cpu, system = match.groups()
    if (cpu, system) != (_cpu(), platform.system().lower()):
        return f"for {system} {cpu}"
    if ("cpu" if backend == "cpu" else "cuda") != device_type:
        return "for cpu" if backend == "cpu" else "for cuda"
    if _version(torch.__version__) < (int(torch_major), int(torch_minor)):
        return f"for torch >= {torch_major}.{torch_minor}"
    if device_type == "cpu":
        return None
    cuda = _version(torch.version.cuda or "0.0")
    if cuda[0] != int(cuda_major) or cuda[1] < int(cuda_minor):
        own = f"CUDA {torch.version.cuda}" if torch.version.cuda else "the CPU alone"
        return (
            f"for CUDA {cuda_major}.{cuda_minor} or a later {cuda_major}.x, but torch is built for "
            f"{own}: take a torch for CUDA {cuda_major}, or a variant for {own}"
        )
    if torch.cuda.is_available():
        capability = torch.cuda.get_device_capability()
        if not any(runs_on(arch, capability) for arch in archs):
            return f"for CUDA archs {' '.join(archs) or 'none'}"
    return None


def runs_on(arch: str, capability: tuple[int, int]) -> bool:
    """Whether code for a CUDA arch (8.0, 9.0a, 10.0f, 12.0+PTX) runs on a device."""
    number = arch.removesuffix("+PTX")
    built = _version(number)
    if number.endswith("a"):  # code with instructions of that chip alone
        return capability == built
    if arch.endswith("+PTX") and number[-1].isdigit() and capability >= built:
        return True
    return capability[0] == built[0] and capability[1] >= built[1]


def _preference(variant: str) -> tuple[int, ...]:
    """Returns the sort key of a variant: newest torch first, then newest CUDA."""
    match = STABLE_VARIANT.fullmatch(variant)
    return tuple(int(number or 0) for number in match.group(1, 2, 4, 5)) if match else ()


def _cpu() -> str:
    machine = platform.machine()
    return {"AMD64": "x86_64", "arm64": "aarch64"}.get(machine, machine)


def _version(text: str) -> tuple[int, int]:
    major, minor = text.split(".")[:2]
    digits = re.match(r"\d+", minor)
    return int(major), int(digits[0]) if digits else 0
