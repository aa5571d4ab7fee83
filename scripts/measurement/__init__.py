"""Result rows with device, versions and commit, their CSV files, and hardware peak rates."""
