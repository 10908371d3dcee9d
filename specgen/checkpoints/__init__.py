"""Checkpoints on disk or a hub: their files, their dialects, what they say. Imports models and ops."""
