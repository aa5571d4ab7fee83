"""Reads a kernel project's build.toml: sources, flags, version, content hash, id.

build.toml has the format of HF's kernel-builder, edition 5, and is first checked by kernels' own
parser (`kernels._rust.Build`). The part of the format that the shared build supports is below;
anything else is an error and never ignored.
"""

from __future__ import annotations

import hashlib
import platform
from dataclasses import dataclass
from pathlib import Path

try:
    import tomllib
except ImportError:  # Python 3.10 has no tomllib
    import tomli as tomllib

BUILDER = Path(__file__).resolve().parent
COMMON = BUILDER.parent / "common"
BACKENDS = ("cpu", "cuda")
MACHINES = {"x86_64": "x86-64", "aarch64": "armv"}  # -> how its -march values begin
HERE = platform.machine()
HASH_DIGITS = 10
GENERAL_KEYS = {"name", "version", "edition", "license", "backends", "upstream", "source", "hub"}
TORCH_KEYS = {"src", "include", "cxx-flags", "pyext", "stable-abi"}
KERNEL_KEYS = {"backend", "depends", "src", "include", "cxx-flags"}
KERNEL_KEYS |= {"cuda-flags", "cuda-capabilities"}


class BuildError(Exception):
    """An error in build.toml; the message names the value, what it was and what it must be."""


@dataclass(frozen=True)
class Component:
    """One [kernel.<name>] table, or the [torch] table, which every backend compiles."""

    name: str
    backend: str | None
    sources: tuple[str, ...]
    include: tuple[str, ...] = ()
    cxx_flags: tuple[str, ...] = ()
    cuda_flags: tuple[str, ...] = ()
    archs: tuple[str, ...] = ()

    def compiles_for(self, machine: str) -> bool:
        """Whether no -march flag names another machine."""
        values = [
            flag.removeprefix("-march=") for flag in self.cxx_flags if flag.startswith("-march=")
        ]
        return all(value.startswith(MACHINES[machine]) for value in values)

    def archs_for(self, requested: tuple[str, ...]) -> tuple[str, ...]:
        """Returns those of the requested archs that this component supports: those that it names, and
        later ones without instructions of their own, because what compiles for an arch compiles for
        all that follow it. If there is none, the first that was requested: the linker needs the
        component's functions, whose kernels trap there."""
        if not self.archs:
            return requested
        own = {arch.removesuffix("+PTX") for arch in self.archs}
        plain = [_capability(arch) for arch in own if arch[-1].isdigit()]

        def supports(arch: str) -> bool:
            number = arch.removesuffix("+PTX")
            later = number[-1].isdigit() and plain and _capability(number) > min(plain)
            return number in own or bool(later)

        return tuple(filter(supports, requested)) or requested[:1]


def _capability(arch: str) -> tuple[int, ...]:
    """Returns (10, 3) for the arch 10.3."""
    return tuple(int(part) for part in arch.split("."))


@dataclass(frozen=True)
class Kernel:
    root: Path
    name: str
    version: int
    license: str
    repo_id: str
    backends: tuple[str, ...]
    stable_abi: dict[str, str]
    components: tuple[Component, ...]
    python_extensions: tuple[str, ...] = ("py", "pyi")
    upstream: str | None = None
    source: str | None = None

    @property
    def python_name(self) -> str:
        return self.name.replace("-", "_")

    @property
    def package(self) -> Path:
        return self.root / "torch-ext" / self.python_name

    def components_for(self, backend: str, machine: str = HERE) -> list[Component]:
        """Returns what a library is compiled from; code for another machine's -march is left out."""
        mine = [c for c in self.components if c.backend in (None, backend)]
        return [c for c in mine if c.compiles_for(machine)]

    def parts(self, archs: tuple[str, ...]) -> list[tuple[str, ...]]:
        """Returns the archs that each CUDA component of a library for `archs` is compiled for."""
        return [c.archs_for(archs) for c in self.components if c.backend == "cuda"]

    def check_backend(self, backend: str) -> None:
        if backend != "universal" and backend not in self.backends:
            raise BuildError(
                f"{self.name}: backend is {backend!r}, but {self.root / 'build.toml'} lists "
                f"{', '.join(self.backends)} (and every kernel builds 'universal')"
            )

    def variant(self, backend: str, cuda: str = "", machine: str = HERE) -> str:
        """Returns the variant's directory name; `cuda` is the toolkit's version, '13.0'."""
        if backend == "universal":
            return "torch-universal"
        abi = self.stable_abi[backend].replace(".", "")
        tag = f"cu{cuda.replace('.', '')}" if backend == "cuda" else backend
        return f"torch-stable-abi{abi}-{tag}-{machine}-linux"

    def files(self) -> list[Path]:
        """Returns every file that decides what the kernel is, its own and the shared build's,
        sorted."""
        own = [self.root / "build.toml"]
        own += [self.root / s for c in self.components for s in c.sources]
        for folder in ("csrc", "torch-ext"):
            own += (self.root / folder).rglob("*")
        own = [f for f in own if f.is_file() and not _is_litter(f.relative_to(self.root))]
        return sorted(set(own)) + shared_files()

    def content_hash(self) -> str:
        """Returns a hash of paths and contents, not of git: equal sources have equal hashes in any
        directory."""
        digest = hashlib.sha256()
        for file in self.files():
            base = self.root if file.is_relative_to(self.root) else BUILDER.parent
            content = file.read_bytes()
            digest.update(f"{base is self.root} {file.relative_to(base).as_posix()} ".encode())
            digest.update(f"{len(content)}\n".encode() + content)
        return digest.hexdigest()[:HASH_DIGITS]

    def id(self, backend: str) -> str:
        """Returns the op namespace, which is also the library's and Python module's name: other
        sources have another id."""
        return f"_{self.python_name}_{backend}_{self.content_hash()}"


def shared_files() -> list[Path]:
    """Returns the shared files that are compiled into every kernel's library. The Python files of
    common/ are not among them: a kernel that uses one links to it, and so lists it as its own."""
    own = [f for folder in (BUILDER, COMMON) for f in folder.rglob("*") if f.is_file()]
    own = [f for f in own if f.suffix != ".py"]
    return sorted(f for f in own if not _is_litter(f.relative_to(BUILDER.parent)))


def read_kernel(root: Path) -> Kernel:
    """Reads and checks `root`/build.toml."""
    root = Path(root).resolve()
    file = root / "build.toml"
    if not file.is_file():
        raise BuildError(f"{root} is not a kernel project: it has no build.toml")
    from kernels._rust import Build

    try:
        Build.open(root)
    except ValueError as error:
        raise BuildError(f"{file} is rejected by kernels' own parser: {error}") from None
    table = tomllib.loads(file.read_text())
    general, torch = table["general"], table.get("torch")
    backends = tuple(general["backends"])
    wrong = [b for b in backends if b not in BACKENDS]
    _expect(not wrong, file, "general.backends", backends, f"some of {', '.join(BACKENDS)}")
    _expect(torch is not None, file, "[torch]", "absent", "there (other frameworks are not built)")
    _expect_keys(general, GENERAL_KEYS, file, "[general]")
    _expect_keys(torch, TORCH_KEYS, file, "[torch]")
    repo_id = general.get("hub", {}).get("repo-id")
    _expect(bool(repo_id), file, "general.hub.repo-id", repo_id, "the Hub repository, 'org/name'")
    abi = torch.get("stable-abi")
    abi = dict.fromkeys(backends, abi) if isinstance(abi, str) else abi
    missing = [b for b in backends if not (abi or {}).get(b)]
    _expect(not missing, file, "torch.stable-abi", abi, f"a torch version for {', '.join(missing)}")
    components = [_component("torch", None, torch, file)]
    for name, entry in table.get("kernel", {}).items():
        _expect_keys(entry, KERNEL_KEYS, file, f"[kernel.{name}]")
        depends = entry.get("depends", [])
        _expect(depends == ["torch"], file, f"kernel.{name}.depends", depends, "['torch']")
        components.append(_component(name, entry["backend"], entry, file))
    kernel = Kernel(
        root=root,
        name=general["name"],
        version=general["version"],
        license=general["license"],
        repo_id=repo_id,
        backends=backends,
        stable_abi=abi,
        components=tuple(components),
        python_extensions=tuple(torch.get("pyext", Kernel.python_extensions)),
        upstream=general.get("upstream"),
        source=general.get("source"),
    )
    _check_files(kernel, file)
    return kernel


def _component(name: str, backend: str | None, table: dict, file: Path) -> Component:
    flags = table.get("cxx-flags", [])
    _expect(isinstance(flags, list), file, f"{name}.cxx-flags", flags, "a list of flags")
    return Component(
        name=name,
        backend=backend,
        sources=tuple(table.get("src", [])),
        include=tuple(table.get("include", [])),
        cxx_flags=tuple(flags),
        cuda_flags=tuple(table.get("cuda-flags", [])),
        archs=tuple(table.get("cuda-capabilities", [])),
    )


def _check_files(kernel: Kernel, file: Path) -> None:
    if not (kernel.package / "__init__.py").is_file():
        raise BuildError(f"{kernel.name}: its Python package {kernel.package} has no __init__.py")
    seen: dict[tuple[str | None, str], str] = {}
    for component in kernel.components:
        for source in component.sources:
            path = kernel.root / source
            where = f"{file}: {component.name}.src lists {source!r}"
            if not path.is_file():
                raise BuildError(f"{where}, but there is no such file")
            if not path.resolve().is_relative_to(kernel.root):
                raise BuildError(f"{where}, but sources must lie below {kernel.root}")
            for backend in (component.backend, None):
                if (backend, source) in seen:
                    raise BuildError(f"{where}, but {seen[backend, source]} lists it already")
            seen[component.backend, source] = component.name
    for component in kernel.components:
        for folder in component.include:
            if not (kernel.root / folder).is_dir():
                raise BuildError(
                    f"{file}: {component.name}.include lists {folder!r}, "
                    "but there is no such directory"
                )


def _is_litter(path: Path) -> bool:
    hidden = any(part.startswith(".") or part == "__pycache__" for part in path.parts)
    return hidden or path.suffix in (".pyc", ".orig", ".rej") or path.name.endswith("~")


def _expect(condition: bool, file: Path, key: str, was: object, must: str) -> None:
    if not condition:
        raise BuildError(f"{file}: {key} is {was}, but must be {must}")


def _expect_keys(table: dict, known: set[str], file: Path, name: str) -> None:
    unknown = ", ".join(sorted(set(table) - known))
    if unknown:
        raise BuildError(
            f"{file}: {name} has {unknown}, which the shared build does not support; "
            f"it supports {', '.join(sorted(known))}"
        )
