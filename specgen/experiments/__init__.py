"""Arms on the same prompts: speeds in turns, lm-eval's tasks, judged texts; kernels and steps with what bounds them.

May import jobs and all below it.
"""
