"""The networks: forward passes of targets and heads over packed rows, and the tables of their families.

May import ops, from kv the spec of a model's cache, and from attention what its ``__init__`` holds.
"""
