"""What scripts/check_repo checks: names and places, pages, words, public and private names."""
