"""What happened, as rows of two tables, counts of them, and the run directory that keeps them. May import config."""
