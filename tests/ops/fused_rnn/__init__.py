"""Tests of fused-rnn."""
