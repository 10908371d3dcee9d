"""Tokens and text: the tokenizer, chat templates, stop strings. Imports only leaves."""
