"""Tests that the commands refuse numbers out of bounds, before they do anything."""

import sys

import pytest

from commands import load_command
from tooling.arguments import above_zero, whole

LEAST_1 = "but must be at least 1"
ABOVE_0 = "but must be a finite number above 0"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("train flash-rnn-python-5m --threads -1", f"argument --threads: it is -1, {LEAST_1}"),
        ("train flash-rnn-python-5m --threads 0", f"argument --threads: it is 0, {LEAST_1}"),
        ("train flash-rnn-python-5m --threads 1.5", "invalid whole number value: '1.5'"),
        ("train flash-rnn-python-5m --max-minutes nan", f"--max-minutes: it is nan, {ABOVE_0}"),
        ("train flash-rnn-python-5m --max-minutes inf", f"--max-minutes: it is inf, {ABOVE_0}"),
        ("train flash-rnn-python-5m --max-minutes 0", f"--max-minutes: it is 0, {ABOVE_0}"),
        ("train flash-rnn-python-5m --max-minutes x", "invalid number value: 'x'"),
        ("evaluate perplexity org/m --held-out --chunk 0", f"argument --chunk: it is 0, {LEAST_1}"),
        ("evaluate lengths org/m --held-out --threads 0", f"--threads: it is 0, {LEAST_1}"),
        ("evaluate tasks org/m --tasks a --batch 0", f"argument --batch: it is 0, {LEAST_1}"),
        ("evaluate tasks org/m --tasks a --limit 0", f"argument --limit: it is 0, {LEAST_1}"),
        ("evaluate tasks org/m --tasks a --shots -1", "--shots: it is -1, but must be at least 0"),
        ("evaluate tasks org/m --tasks a --max-length 0", f"--max-length: it is 0, {LEAST_1}"),
    ],
)
def test_a_number_out_of_bounds_is_named(words, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", words.split())
    with pytest.raises(SystemExit) as refused:
        load_command(words.split()[0]).parse_arguments()
    assert refused.value.code == 2
    assert said in capsys.readouterr().err


def test_numbers_within_bounds_are_taken():
    assert (whole(0)("0"), whole(1)("1"), above_zero("1e-4")) == (0, 1, 1e-4)
