"""The known text of a calibrated pair (``scripts/make_calibrated_pair.py``), for counting wrong tokens."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import zip_longest

from specgen.core.sequence import Completion
from specgen.engine.loading import Models
from specgen.json_fields import load_json


@dataclass(frozen=True, kw_only=True)
class KnownText:
    """A cycle of tokens: each one determines the next."""

    follower: Mapping[int, int]
    accept: float  # share of the tokens whose follower the drafter knows
    max_positions: int  # of prompt and text

    @classmethod
    def of(cls, models: Models) -> "KnownText | None":
        """That of ``models``; None without one, or if the drafter's own vocabulary has other tokens."""
        file = models.checkpoints["model"].path.resolve().parent / "cycle.json"
        if not (models.synthetic and file.is_file()):
            return None
        cycle = load_json(file, "make the pair again")
        tokens, head = cycle["tokens"], models.head
        vocabulary = tokens  # of the drafts, where that is a part of the target's
        if head is not None and head.config.draft_vocab_size < head.config.vocab_size:
            vocabulary = head.draft_to_target.tolist()
        if not set(vocabulary) <= set(tokens):
            return None
        return cls(
            follower=dict(zip(tokens, [*tokens[1:], tokens[0]], strict=True)),
            accept=cycle["accept"],
            max_positions=models.target.config.max_positions,
        )

    def num_wrong(self, completions: Iterable[Completion]) -> int:
        """Tokens that differ from the known text, missing and surplus ones included."""
        wrong = 0
        for completion in completions:
            prompt, token_ids = completion.request.prompt_token_ids, completion.token_ids
            length = min(completion.request.sampling.max_tokens, self.max_positions - len(prompt))
            text = [self.follower[prompt[-1]]]
            while len(text) < length:
                text.append(self.follower[text[-1]])
            wrong += sum(ours != known for ours, known in zip_longest(token_ids, text))
        return wrong
