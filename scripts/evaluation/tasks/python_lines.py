"""The task python_lines: given the beginning of a Python program, choose one of four endings.

The wrong endings are the right ones of the next three questions; where the right one stands
changes from question to question.
"""

from typing import Any

# The ending is the shortest that leaves no doubt for a reader of Python.
LINES = (
    ("def size(self):\n    return len(", "self._items)\n"),
    ("for name in sorted(names)", ":\n"),
    ("try:\n    import json\nexcept ", "ImportError:\n"),
    ("if value is not ", "None:\n"),
    ('if __name__ == "__main__":\n    ', "main()\n"),
    ("class Queue:\n    def __init__(", "self, size=0):\n"),
    ('raise TypeError("expected a string, got %r" ', "% value)\n"),
    ("with open(path, 'rb') ", "as file:\n"),
    ("while True:\n    line = file.readline()\n    if not line:\n        ", "break\n"),
    ("import os\nimport ", "sys\n"),
    ("from collections import ", "namedtuple\n"),
    ('    """Return the number of items in the queue.', '"""\n'),
    ("def __repr__(self):\n    return '<%s>' % self.__class__.", "__name__\n"),
    ("squares = [x * x for x ", "in range(10)]\n"),
    ("if isinstance(value, (int, ", "float)):\n"),
    ("self.name = name\nself.value = ", "value\n"),
    ("def is_empty(self):\n    return not ", "self._queue\n"),
    ("key, value = line.split('=', ", "1)\n"),
    ("@property\ndef ", "name(self):\n"),
    ("if not os.path.exists(", "path):\n"),
    ("items = {}\nfor key in keys:\n    items", "[key] = None\n"),
    ("class ParseError(", "Exception):\n    pass\n"),
    ("result = []\nfor item in items:\n    result.append(", "item)\n"),
    ("@classmethod\ndef from_string(", "cls, text):\n"),
    ("def __enter__(self):\n    return ", "self\n"),
    ("def __eq__(self, other):\n    if not isinstance(other, Point):\n        return ",
     "NotImplemented\n"),
    ("try:\n    value = int(text)\nexcept ", "ValueError:\n"),
    ("lock.acquire()\ntry:\n    work()\n", "finally:\n    lock.release()\n"),
    ("parser = argparse.ArgumentParser()\nparser.", "add_argument('file')\n"),
    ("if start < 0:\n    start = 0\nelif ", "start > end:\n"),
    ("__all__ = ['open', 'close', ", "'read']\n"),
    ("def close(self):\n    if self._file is not None:\n        self._file.", "close()\n"),
)  # fmt: skip


def load(**_: Any) -> dict[str, Any]:
    """Returns {"test": dataset of text, choices, answer}; lm-eval passes the YAML's extra
    arguments."""
    from datasets import Dataset

    rows = []
    for i, (text, ending) in enumerate(LINES):
        choices = [LINES[(i + j) % len(LINES)][1] for j in (1, 2, 3)]
        choices.insert(i % 4, ending)
        rows.append({"text": text, "choices": choices, "answer": i % 4})
    return {"test": Dataset.from_list(rows)}
