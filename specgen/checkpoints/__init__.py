"""Checkpoints on disk or a hub: their files, their formats, what they say. May import models and ops."""
