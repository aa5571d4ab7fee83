"""Rows of results: device, versions, commit, the CSV files, and what the hardware can do."""
