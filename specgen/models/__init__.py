"""The networks: forward passes of targets and heads over packed rows, and the tables of their families.

May import ops, and of kv what a model says of its cache.
"""
