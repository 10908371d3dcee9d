"""Measurements of kernels and of the engine. May import engine and all below it."""
