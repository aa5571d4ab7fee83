"""Weights of 8 and 4 bits: how a model gets them, and the layer that holds them."""
