"""Tests of diagonal-rnn."""
