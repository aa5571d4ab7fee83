"""Random calls of the stand-ins for torch.nn's modules, beside torch.nn's own."""
