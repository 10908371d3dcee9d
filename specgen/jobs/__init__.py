"""From a prompt set to a run directory: one process, shards, Ray, a lost device. Imports engine and below."""
