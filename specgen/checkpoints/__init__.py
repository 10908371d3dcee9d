"""Checkpoints on disk or on the hub: files, loading, ``specgen inspect``. May import models and ops."""
