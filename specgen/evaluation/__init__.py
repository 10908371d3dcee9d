"""lm-eval's tasks and audits, arm by arm over the same prompts. May import engine and all below it."""
