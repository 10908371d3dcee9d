"""Accuracy and losslessness: lm-eval's tasks on the engine, and arms compared on the same prompts."""
