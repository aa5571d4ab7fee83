"""Recurrent states: in a cache, in a file, between documents, and from one device to the next."""
