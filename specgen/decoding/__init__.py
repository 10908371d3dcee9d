"""Speculative decoding itself: drafting, verification, sampling. Imports models, attention, ops, kv."""
