"""Weights of 8 bits: how a model gets them, and the layer that holds them."""
