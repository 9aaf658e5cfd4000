"""Anthropic's Messages API: its body in, its answers out."""
