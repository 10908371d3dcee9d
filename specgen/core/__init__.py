"""The order of work: who runs, what a step is, what happens when one fails. May import decoding, text and below."""
