"""Tests: every process of them computes on one thread, and so does what it starts.

The models are tiny, and threads that wait for each other are slower; beside another worker they are slower still.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before anything imports torch
