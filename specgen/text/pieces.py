"""The text of every single token, such that the pieces of a text together are exactly that text."""

from collections.abc import Sequence

from specgen.text.reasoning import Part, new_reader
from specgen.text.tokenizer import ByteRuns, Tokenizer

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what a decoder writes for an incomplete character


def pieces(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[str]:
    """What each token adds to ``tokenizer.decode(token_ids)``; special tokens add nothing.

    A character of several tokens is a piece of the last of them. Each token is decoded behind the few before it,
    because a decoder may drop the leading space of a text.
    """
    token_ids = _decodable(tokenizer, token_ids)
    found: list[str] = []
    begin, known = 0, 0  # tokens: where decoding begins, and those before which all characters are complete
    for end in range(1, len(token_ids) + 1):
        before = tokenizer.decode(token_ids[begin:known])
        text = tokenizer.decode(token_ids[begin:end])
        complete = len(text) > len(before) and not text.endswith(_UNFINISHED)
        found.append(text[len(before) :] if complete else "")
        if complete:
            begin, known = known, end
    whole, so_far = tokenizer.decode(token_ids), "".join(found)
    if found and whole.startswith(so_far):  # a text may end within a character
        found[-1] += whole[len(so_far) :]
    return found


def _decodable(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[int]:
    """As ``ByteRuns`` has them; tokens without text stay."""
    shown: list[int] = []
    runs = ByteRuns(tokenizer, shown)
    texts = [tokenizer.has_text(token_id) for token_id in token_ids]
    for token_id, has_text in zip(token_ids, texts, strict=True):
        if has_text:
            runs.append(token_id)
    runs.end()
    found = iter(shown)
    return [
        next(found) if has_text else token_id for token_id, has_text in zip(token_ids, texts, strict=True)
    ]


def fitted(parts: Sequence[str], text: str) -> list[str] | None:
    """``parts`` cut so that together they are exactly ``text``, a part of theirs; None where it is not."""
    begin = "".join(parts).find(text)
    if begin < 0:
        return None
    found, at = [], 0
    for part in parts:
        found.append(part[max(0, begin - at) : max(0, begin + len(text) - at)])
        at += len(part)
    return found


def pieces_by_part(
    tokenizer: Tokenizer, prompt: str, token_ids: Sequence[int]
) -> dict[Part, list[tuple[int, str]]]:
    """Index and piece of every token after the rendered ``prompt``, in the reasoning and in the answer.

    Blocks of reasoning are joined by a line break, as in ``reasoning.split``.
    """
    reader = new_reader(tokenizer, ())
    if reader is not None:  # only then is the prompt worth encoding
        reader = new_reader(tokenizer, tokenizer.encode_rendered(prompt))
    if reader is None:
        return {"answer": list(enumerate(pieces(tokenizer, token_ids)))}
    read = [reader.read(token_id) for token_id in token_ids]
    found: dict[Part, list[tuple[int, str]]] = {"reasoning": [], "answer": []}
    for part, listed in found.items():
        own = [index for index, (of, _) in enumerate(read) if of == part]
        shown = [index for index in own if read[index][1]]
        texts: dict[int, str] = {}
        for block in _blocks(shown, own) if part == "reasoning" else [shown]:
            block_pieces = pieces(tokenizer, [token_ids[index] for index in block])
            if texts and block_pieces:
                block_pieces[0] = "\n" + block_pieces[0]
            texts |= zip(block, block_pieces, strict=True)
        listed += [(index, texts.get(index, "")) for index in own]
    return {part: listed for part, listed in found.items() if listed}


def _blocks(shown: Sequence[int], own: Sequence[int]) -> list[list[int]]:
    """``shown`` in runs that no marker, one of ``own`` alone, interrupts."""
    visible = set(shown)
    blocks: list[list[int]] = [[]]
    for index in own:
        if index in visible:
            blocks[-1].append(index)
        elif blocks[-1]:
            blocks.append([])
    return [block for block in blocks if block]
