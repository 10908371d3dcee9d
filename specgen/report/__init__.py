"""From rows to numbers, from numbers to text and pages. May import record and text."""
