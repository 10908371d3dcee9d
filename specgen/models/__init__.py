"""The networks: target and drafter forward passes over packed rows, independent of attention, cache and engine."""
