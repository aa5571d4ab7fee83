"""What a release needs from a person: accounts, rights, signatures, a date. CONTRIBUTING.md has the
commands, in the section that every message here names."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import HfApi, get_token

from releasing import notes
from releasing.progress import Stop
from releasing.release import ROOT
from tooling.builder import variant

PAGE = 'CONTRIBUTING.md, "What a release needs from a person"'
ORGANIZATION = "flashcell"
KERNEL_RIGHT = (
    f"If it says that {ORGANIZATION} may not create kernel repositories, ask for that right: {PAGE}"
)
WRITERS = {"admin", "write", "contributor"}  # roles that may create repositories


def missing(version: str) -> Iterator[str]:
    """Yields what is not there yet, as far as it shows without a network: the release will stop at it."""
    yield from filter(None, [no_date(version), no_token(), no_index_token()])


def no_date(version: str) -> str | None:
    try:
        date, _ = notes.section((ROOT / "CHANGELOG.md").read_text(), version)
    except ValueError as error:
        return str(error)
    if date and date != "unreleased":
        return None
    return f"CHANGELOG.md says {date or 'nothing'!r} beside {version}, but must say the date"


def no_token() -> str | None:
    return None if get_token() else f"no token of the Hub: hf auth login ({PAGE})"


def no_index_token() -> str | None:
    if os.environ.get("TWINE_PASSWORD"):
        return None
    return f"TWINE_PASSWORD is not set, but the upload needs the index's token ({PAGE})"


def check_date(version: str) -> None:
    if problem := no_date(version):
        raise Stop(problem)


def check_hub() -> None:
    """Raises unless the user's token may write to the organization's repositories."""
    if problem := no_token():
        raise Stop(problem)
    try:
        user = HfApi().whoami()
    except Exception as error:  # the Hub's, or of its client's HTTP library
        first = (str(error).splitlines() or [""])[0]
        raise Stop(f"the Hub does not say whose the token is: {first} ({PAGE})") from error
    roles = {org["name"]: org.get("roleInOrg") for org in user.get("orgs", ())}
    if roles.get(ORGANIZATION) not in WRITERS:
        raise Stop(
            f"{user.get('name')} is {roles.get(ORGANIZATION) or 'no member'} in {ORGANIZATION} on the "
            f"Hub, but must be one of {', '.join(sorted(WRITERS))}: {PAGE}"
        )


def check_index() -> None:
    if problem := no_index_token():
        raise Stop(problem)


def check_signatures(variants: list[Path]) -> str:
    """Raises unless a signature that can be read lies in every variant; returns a line about them."""
    from sigstore.models import Bundle, InvalidBundle

    if not variants:
        raise Stop("there is no variant to sign: start scripts/release again, and it builds them")
    absent = [folder for folder in variants if not (folder / variant.SIGNATURE).is_file()]
    if absent:
        commands = "\n".join(
            f"  python -m sigstore sign --bundle {folder / variant.SIGNATURE} {folder / 'metadata.json'}"
            for folder in absent
        )
        raise Stop(
            f"{len(absent)} of {len(variants)} variants are not signed: sign them, and run "
            f"scripts/release again ({PAGE})\n{commands}"
        )
    for folder in variants:
        try:
            Bundle.from_json((folder / variant.SIGNATURE).read_bytes())
        except (InvalidBundle, ValueError) as error:
            raise Stop(
                f"{folder / variant.SIGNATURE} is no signature of sigstore ({error}): remove it and "
                f"sign again ({PAGE})"
            ) from error
    return f"{len(variants)} variants have a signature"
