"""What happened, as rows of two tables, and counts of them; the phases of a start. May import no other package."""
