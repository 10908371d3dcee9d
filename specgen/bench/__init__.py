"""Benchmarks of kernels and of the engine, with one type of result."""
