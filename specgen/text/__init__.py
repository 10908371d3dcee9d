"""Tokens and text: the tokenizer, chat templates, stop strings. May import no other package."""
