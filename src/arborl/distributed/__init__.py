"""Ranks: what they gather, how they split weights, how they stop together."""
