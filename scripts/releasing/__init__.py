"""The steps of scripts/release: what each does, what is done already, and where a release goes."""
