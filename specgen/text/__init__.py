"""Tokens and text: the tokenizer, chat templates, stop strings, reasoning and answer. May import no other package."""
