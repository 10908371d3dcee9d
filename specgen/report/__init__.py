"""From events to numbers, from numbers to text and pages. May import no other package."""
