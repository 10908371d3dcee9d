"""The ids of the turns of a conversation."""


def turn_id(conversation: str, turn: int) -> str:
    """The id of the request for a turn of the conversation with this id; its first turn, 1, has the id itself."""
    return conversation if turn == 1 else f"{conversation}/turn-{turn}"


def conversation_of(request: str, turn: int) -> str:
    """The id of the conversation whose ``turn`` this ``request`` asks; the inverse of ``turn_id``."""
    return request if turn == 1 else request.removesuffix(f"/turn-{turn}")
