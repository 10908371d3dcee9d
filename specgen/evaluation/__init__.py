"""Evaluation: lm-eval's tasks on this engine, and arms of one study compared over the same prompts."""
