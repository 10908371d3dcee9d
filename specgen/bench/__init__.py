"""Measurements of kernels, of one layer and of one decode step, with what bounds them. May import engine and all below
it."""
