"""What followed the first question in the conversations of a data set."""

from collections.abc import Iterator, Sequence

from specgen.text.tokenizer import Message

_SENDERS = {
    "user": ("human", "user"),
    "assistant": ("gpt", "chatgpt", "assistant", "bing", "bard"),
}  # of ShareGPT


def recorded(others: Sequence[object]) -> Iterator[Message]:
    """The messages behind ShareGPT's first: answers and questions in turn, up to the first that is out of turn."""
    for number, message in enumerate(others):
        role = "user" if number % 2 else "assistant"
        if not isinstance(message, dict) or message.get("from") not in _SENDERS[role]:
            return
        text = message.get("value")
        if not isinstance(text, str) or not text.strip():
            return
        yield Message(role=role, content=text)
