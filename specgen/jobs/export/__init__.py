"""The rows of a run in other formats."""
