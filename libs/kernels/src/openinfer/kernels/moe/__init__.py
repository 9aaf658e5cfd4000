"""Mixtures of experts as commands."""
