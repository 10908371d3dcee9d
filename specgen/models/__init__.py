"""The networks: target and drafter forward passes over packed rows, free of attention, cache and engine."""
