"""The order of work: who runs, what a step is, what happens when one fails. Imports decoding and what is below."""
