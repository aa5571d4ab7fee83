"""The Python of a page is run as it stands; checkpoints of the Hub are taken from this checkout."""

from pathlib import Path

from repo_checks import pages

ROOT = Path(__file__).resolve().parents[2]
CARD = 'words\n```python\nimport os\nassert os.path.isfile(os.path.join("flashcell/{}", "config.json"))\n```\n'


def failures(page: str | None) -> list[str]:
    return list(pages.failures(ROOT, lambda name: page, ["page.md"]))


def test_a_checkpoint_of_the_hub_is_the_folder_of_this_checkout():
    assert failures(CARD.format("flash-rnn-python-5m")) == []
    (failed,) = failures(CARD.format("another"))
    assert failed.startswith("page.md: its Python fails:")
    assert "AssertionError" in failed


def test_a_page_without_python_is_named():
    assert failures("words") == failures(None) == ["page.md: has no Python to run"]


def test_all_pages_run_and_each_failure_is_named():
    names = ["good", "bad", "good", "worse"]
    text = lambda name: "```py\n" + {"good": "x = 1", "bad": "1 / 0"}.get(name, "y") + "\n```"
    found = list(pages.failures(ROOT, text, names))
    assert [line.partition(":")[0] for line in found] == ["bad", "worse"]
    assert "ZeroDivisionError" in found[0]
