"""Shared helpers: compatibility of old import paths, and atomic file writes."""
