"""Attention as commands, and the cache that it reads."""
