"""The run directory: rows that survive a kill, manifest, status, lock. May import record."""
