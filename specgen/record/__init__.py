"""What happened, as rows of two tables, and the run directory that keeps them. May import ``config``."""
