"""What happened, as rows of two tables, and counts of them. May import no other package."""
