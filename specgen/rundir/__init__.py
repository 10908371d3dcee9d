"""The run directory: rows that survive a kill, manifest, status, lock. Imports only leaves."""
