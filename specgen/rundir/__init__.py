"""The run directory: rows that survive a kill, manifest, status, lock. Imports leaves alone."""
