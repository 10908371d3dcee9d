"""The algorithm: drafting, verification, sampling. May import attention, models, ops and kv."""
