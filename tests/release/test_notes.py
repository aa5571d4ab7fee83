"""The notes of a release, and what a release asks of a person."""

import hashlib

import pytest

from commands import load_command
from flashcell.hub.lock_format import read_lock
from releasing import notes, people
from releasing.progress import Stop, check
from releasing.release import LOCK, ROOT
from releasing.steps import steps

CHANGELOG = """# Changelog

## 1.1.0 - 2026-12-01

### Kernel API v2 (toy)

- BREAKING: `step` takes a state
  of its own.
- a function
  on two lines:
  - with a part

## [1.0.0] - 2026-11-01

- the first
"""


def test_notes_of_one_version(tmp_path):
    (tmp_path / "b.whl").write_bytes(b"wheel")
    digest = hashlib.sha256(b"wheel").hexdigest()
    toy = {"repo": "o/toy", "version": 2, "revision": "f" * 40, "variants": {"a": {}, "b": {}}}
    text = notes.notes("1.1.0", CHANGELOG, {"toy": toy}, [tmp_path / "b.whl"])
    assert text.startswith(
        "# flashcell 1.1.0\n\n## Breaking changes\n\n- `step` takes a state of its own.\n"
    )
    assert "\n### Kernel API v2 (toy)\n" in text
    assert "\n- a function on two lines:\n  - with a part\n" in text
    assert "the first" not in text
    assert f"\n| toy, `o/toy` | 2 | `{'f' * 40}` | `a`<br>`b` |\n" in text
    assert f"\n| b.whl | 0.00 MB | `{digest}` |\n" in text
    assert "Breaking" not in notes.notes("1.0.0", CHANGELOG, {}, [])
    with pytest.raises(ValueError, match=r"has no heading '## 2\.0 - DATE'"):
        notes.section(CHANGELOG, "2.0")


def test_the_committed_changelog_and_lock_give_notes():
    lock = read_lock(ROOT / LOCK)["kernels"]
    text = notes.notes("0.1.0", (ROOT / "CHANGELOG.md").read_text(), lock, [])
    assert all(f"| {name}, `flashcell/{name}` |" in text for name in lock)


def test_steps_stand_in_their_order():
    for rehearsal in (False, True):
        check(steps(rehearsal), [])
    assert [s.name for s in steps(True) if s.name not in {s.name for s in steps(False)}] == [
        "clone"
    ]
    assert [s.name for s in steps(True)] == ["clone", *load_command("release").NAMES]
    assert "sign" in [s.name for s in steps(False)]
    assert "sign" not in [s.name for s in steps(True)]


def test_messages_name_a_section_that_exists():
    page, section = people.PAGE.split(", ")
    assert f"\n## {section.strip(chr(34))}\n" in (ROOT / page).read_text()


def test_what_a_person_has_not_done_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(people, "ROOT", tmp_path)
    monkeypatch.setattr(people, "get_token", lambda: None)
    monkeypatch.delenv("TWINE_PASSWORD", raising=False)
    (tmp_path / "CHANGELOG.md").write_text("## 1.0 - unreleased\n")
    date, hub, index = people.missing("1.0")
    assert date == "CHANGELOG.md says 'unreleased' beside 1.0, but must say the date"
    assert hub.startswith("no token of the Hub: hf auth login (CONTRIBUTING.md, ")
    assert index.startswith("TWINE_PASSWORD is not set, but the upload needs the index's token")
    for refused in (lambda: people.check_date("1.0"), people.check_hub, people.check_index):
        with pytest.raises(Stop):
            refused()
    monkeypatch.setattr(people, "get_token", lambda: "hf_x")
    monkeypatch.setenv("TWINE_PASSWORD", "x")
    (tmp_path / "CHANGELOG.md").write_text("## 1.0 - 2026-12-01\n")
    assert list(people.missing("1.0")) == []


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"name": "ann", "orgs": [{"name": "flashcell", "roleInOrg": "write"}]}, None),
        ({"name": "ann", "orgs": [{"name": "flashcell", "roleInOrg": "read"}]}, "ann is read in"),
        ({"name": "ann"}, "ann is no member in flashcell on the Hub, but must be one of admin, "),
        (OSError("no network"), "the Hub does not say whose the token is: no network"),
    ],
)
def test_the_token_must_be_a_writer_s(monkeypatch, answer, said):
    class Api:
        def whoami(self):
            if isinstance(answer, Exception):
                raise answer
            return answer

    monkeypatch.setattr(people, "get_token", lambda: "hf_x")
    monkeypatch.setattr(people, "HfApi", Api)
    if said is None:
        people.check_hub()
    else:
        with pytest.raises(Stop, match=said):
            people.check_hub()


def test_unsigned_variants_are_listed_with_the_commands(tmp_path):
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
        (folder / "metadata.json").write_text("{}")
    (folders[0] / "metadata.json.sigstore").write_text("{}")
    with pytest.raises(Stop, match="1 of 2 variants are not signed") as caught:
        people.check_signatures(folders)
    command = f"python -m sigstore sign --bundle {folders[1]}/metadata.json.sigstore"
    assert f"{command} {folders[1]}/metadata.json" in str(caught.value)
    assert str(folders[0]) not in str(caught.value)
    with pytest.raises(Stop, match="there is no variant to sign"):
        people.check_signatures([])
    with pytest.raises(Stop, match=r"a/metadata\.json\.sigstore is no signature of sigstore"):
        people.check_signatures(folders[:1])
