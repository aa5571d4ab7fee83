"""Tests of tfla."""
