"""Generated training text of the bundled pair."""
