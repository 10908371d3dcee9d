"""Measurements of kernels and of the engine, and the one form that all their results have."""
