"""Ranks of a model, and what they exchange."""
