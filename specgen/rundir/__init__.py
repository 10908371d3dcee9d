"""The run directory: rows that survive a kill, what was asked for, how far it is. May import no other package."""
