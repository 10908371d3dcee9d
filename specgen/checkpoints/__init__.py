"""Checkpoints on disk or on the hub: files, loading, ``specgen inspect``. Imports models and ops."""
