"""Folds events into statistics and renders them as text and HTML; knows nothing of the engine."""
