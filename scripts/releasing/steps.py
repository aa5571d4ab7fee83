"""The steps of a release, in their order."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from huggingface_hub import HfApi

from flashcell.hub.lock_format import read_lock
from releasing import notes, people
from releasing.progress import Step, Stop
from releasing.release import LOCK, ROOT, Release, git
from tooling import environment
from tooling.builder import HERE, toolkits, variant

FIRST_USE = Path(__file__).with_name("first_use.py")
MODEL = "flash-rnn-python-5m"  # the model that is loaded by name at the end


def clone(release: Release) -> str:
    """Makes the clone anew, without what an earlier rehearsal of other sources has left."""
    for path in release.folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
    partial = release.folder / "tree.partial"
    git(ROOT, "clone", "--quiet", str(ROOT), str(partial))
    commit = git(ROOT, "rev-parse", "HEAD")
    git(partial, "checkout", "--quiet", "--detach", commit)
    for folder in built(ROOT, release):  # build_kernels checks their digests
        shutil.copytree(folder, partial / folder.relative_to(ROOT))
    partial.rename(release.tree)
    return f"commit {commit[:12]}"


def run_tests(release: Release) -> str:
    test = [ROOT / "scripts/test", "--home", release.home, *["--here"] * release.here]
    for tier in (["--all"], ["--versions", "oldest"], ["--versions", "newest"]):
        release.program(*test, *tier, failure=f"scripts/test {' '.join(tier)} fails")
    return "all tests, and the models' with the oldest and the newest torch and transformers"


def build_kernels(release: Release) -> str:
    for options in builds(release):
        release.script(
            "build_kernels", *options, "--home", release.home, failure="a kernel could not be built"
        )
    release.script("publish_kernels", "--compliance", failure="the list cannot be made")
    found = built(release.tree, release)
    return f"{len(found)} variants: {', '.join(sorted({folder.name for folder in found}))}"


def build_again(release: Release) -> str:
    """Builds everything a second time, without a compiler's cache, and compares all bytes."""
    again = release.folder / "again"
    home = again / "home"
    home.mkdir(parents=True, exist_ok=True)
    for toolkit in release.home.glob("cuda-*"):  # nvcc, which is not built but fetched
        if not (home / toolkit.name).exists():
            (home / toolkit.name).symlink_to(toolkit)
    for options in builds(release):
        release.script(
            "build_kernels", *options, "--home", home, "--out", again / "variants",
            failure="a kernel could not be built a second time", CCACHE_DISABLE="1",
        )  # fmt: skip
    found = built(release.tree, release)
    for first in found:
        second = again / "variants" / first.parent.parent.name / first.name
        if (one := variant.digests(first)) != (other := variant.digests(second)):
            wrong = sorted(name for name in {*one, *other} if one.get(name) != other.get(name))
            raise Stop(
                f"{first} and {second} are two builds of the same sources, but differ in "
                f"{', '.join(wrong)}: what is published must be what anybody gets"
            )
    shutil.rmtree(again)
    return f"{len(found)} variants built twice are equal, byte for byte"


def sign(release: Release) -> str:
    return people.check_signatures(built(release.tree, release))


def publish(release: Release) -> str:
    if not release.rehearsal:
        people.check_date(release.version)
        people.check_hub()
    shutil.copyfile(ROOT / LOCK, release.lock)  # pins variants from other machines, perhaps
    options = ["--lock", release.lock, *hub_options(release)]
    release.script("publish_kernels", *options, failure=f"the Hub refused. {people.KERNEL_RIGHT}")
    kernels = read_lock(release.lock)["kernels"]
    return ", ".join(f"{k['repo']} v{k['version']} {k['revision'][:12]}" for k in kernels.values())


def pin(release: Release) -> str:
    committed = git(release.tree, "show", f"HEAD:{LOCK}")
    if committed.strip() != release.lock.read_text().strip():
        release.commit_lock()
    return f"{LOCK} is committed, in {git(release.tree, 'rev-parse', 'HEAD')[:12]}"


def build_wheels(release: Release) -> str:
    dist = release.folder / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    # This machine's last: the source archive has the digests of its CUDA variants.
    for options in reversed(builds(release)):
        chosen = [word for word in options if word != "universal"]
        release.script(
            "build_wheels", *chosen, "--home", release.home, "--out", dist,
            failure="the wheels could not be built",
        )  # fmt: skip
    files = sorted(dist.iterdir())
    twine = release.tools() / "twine"
    release.program(twine, "check", "--strict", *files, failure="an index would refuse a package")
    return ", ".join(file.name for file in files)


def export_models(release: Release) -> str:
    """Exports every model card's model and uploads it; the same content again changes nothing."""
    api = HfApi(endpoint=release.endpoint, token=False if release.rehearsal else None)
    cards = sorted(file.parent for file in release.tree.glob("model_cards/*/config.json"))
    for card in cards:
        out = release.folder / "models" / card.name
        options = [card, out, "--lock", release.tree / LOCK]
        release.script("export_model", *options, failure=f"{card.name} could not be exported")
        repo = f"flashcell/{card.name}"
        try:
            api.create_repo(repo, exist_ok=True)
            message = f"flashcell {release.version}"
            api.upload_folder(
                repo_id=repo, folder_path=out, delete_patterns="*", commit_message=message
            )
        except Exception as error:  # the Hub's, or of its client's HTTP library
            first = (str(error).splitlines() or [""])[0]
            raise Stop(f"the Hub did not take {repo}: {type(error).__name__}: {first}") from error
    return ", ".join(f"flashcell/{card.name}" for card in cards)


def write_notes(release: Release) -> str:
    changelog = (release.tree / "CHANGELOG.md").read_text()
    kernels = read_lock(release.tree / LOCK)["kernels"]
    files = (release.folder / "dist").iterdir()
    file = release.folder / "notes.md"
    file.write_text(notes.notes(release.version, changelog, kernels, files))
    return str(file)


def upload(release: Release) -> str:
    if not release.rehearsal:
        people.check_index()
    files = sorted((release.folder / "dist").iterdir())
    twine = [release.tools() / "twine", "upload", "--non-interactive", "--disable-progress-bar"]
    options = release.upload_options()
    release.program(*twine, *options, *files, failure="the index refused a package")
    return f"{len(files)} packages"


def install(release: Release) -> str:
    """Does what a user does first: pip, then the kernels of the wheel and of the Hub, and a model."""
    user, report = release.folder / "user", release.folder / "pip.json"
    wanted = [f"flashcell=={release.version}", "--report", str(report), *release.index_options]
    environment.make_user(user, release.folder / "pip-user.log", wanted)
    (got,) = (
        entry["download_info"]
        for entry in json.loads(report.read_text())["install"]
        if entry["metadata"]["name"] == "flashcell"
    )
    if got["archive_info"]["hashes"]["sha256"] not in (release.folder / "notes.md").read_text():
        raise Stop(f"pip installed {got['url']}, which is not the package that was made here")
    (packages,) = user.glob("lib/python3*/site-packages")
    lock = str(packages / "flashcell/hub/kernels_lock.py")
    names = read_lock(Path(lock))["kernels"]
    python, caches = [user / "bin/python", "-I", FIRST_USE], str(release.folder / "caches")
    shutil.rmtree(caches, ignore_errors=True)  # everything comes from the Hub
    hub = {"HF_ENDPOINT": release.endpoint} if release.endpoint else {}
    for source, more in (("installed", {}), ("hub", {"FLASHCELL_LOCK": lock})):
        release.program(
            *python, source, f"flashcell/{MODEL}", *names,
            failure=f"flashcell does not work with kernels that are {source}",
            **{"HF_HOME": caches, **hub, **more},
        )  # fmt: skip
    shutil.rmtree(user)  # a gigabyte
    return f"from {got['url']}; kernels from the wheel and from the Hub, and flashcell/{MODEL}"


def built(tree: Path, release: Release) -> list[Path]:
    """Returns the folders of the finished variants that this release has."""
    parts = ["torch-universal", *(f"-cpu-{machine}-" for machine in release.machines)]
    parts += ["-cu1"] if "cuda" in release.backends else []
    folders = sorted(file.parent for file in tree.glob("kernel_builds/*/build/[!.]*/metadata.json"))
    return [folder for folder in folders if any(part in folder.name for part in parts)]


def builds(release: Release) -> list[list[str]]:
    """Returns the options of every call of build_kernels, this machine's first."""
    options = ["--backend", *release.backends]
    if "cuda" in release.backends:
        options += [
            "--cuda",
            *toolkits.VERSIONS,
            *(["--archs", release.archs] * bool(release.archs)),
        ]
    others = [machine for machine in release.machines if machine != HERE]
    return [options, *(["--backend", "cpu", "--machine", machine] for machine in others)]


def hub_options(release: Release) -> list[str]:
    return ["--endpoint", release.endpoint] if release.endpoint else []


CLONE = Step("clone", "clone the commit", clone, makes=("tree",))
SIGN = Step("sign", "check that every variant is signed", sign, ("kernels", "reproduce"))
STEPS = [
    Step("tests", "run all tests", run_tests),
    Step("kernels", "build every variant of every kernel", build_kernels),
    Step("reproduce", "build them again and compare", build_again, ("kernels",)),
    Step("publish", "upload the kernels to the Hub", publish, ("kernels",), ("kernels_lock.py",)),
    Step("lock", "pin what was published", pin, ("publish",)),
    Step("wheels", "build the packages that pip installs", build_wheels, ("lock",), ("dist",), "commit"),
    Step("models", "export the models and upload them", export_models, ("lock",), ("models",), "commit"),
    Step("notes", "write the release notes", write_notes, ("wheels",), ("notes.md",), "commit"),
    Step("index", "upload the packages to the index", upload, ("notes",), (), "commit"),
    Step("install", "install and use them as a user does", install, ("index", "models"), (), "commit"),
]  # fmt: skip


def steps(rehearsal: bool) -> list[Step]:
    """Returns the steps of a rehearsal, or of a release."""
    if not rehearsal:
        place = [step.name for step in STEPS].index("publish")
        return [*STEPS[:place], SIGN, *STEPS[place:]]
    needs_clone = lambda step: Step(**{**vars(step), "needs": (*step.needs, "clone")})
    return [CLONE, *(needs_clone(step) for step in STEPS)]
