"""Cases and providers of tfla."""
