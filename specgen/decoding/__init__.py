"""The algorithm: drafting, verification, sampling. May import attention, models and kv."""
