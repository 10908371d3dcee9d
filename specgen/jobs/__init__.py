"""A prompt set to a run directory: one process, shards, Ray, a lost device. May import engine and all below it."""
