"""Events to numbers, numbers to text and pages. Imports leaves alone."""
