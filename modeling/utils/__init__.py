"""What several folders need and none owns: import paths from before there were folders, whole files."""
