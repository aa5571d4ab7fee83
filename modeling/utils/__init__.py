"""Shared helpers: atomic file writes, tokens of chats, private names, and old import paths."""
