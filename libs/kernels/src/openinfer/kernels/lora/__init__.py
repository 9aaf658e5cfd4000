"""Adapters (LoRA): their files, their places on a device, their products."""
