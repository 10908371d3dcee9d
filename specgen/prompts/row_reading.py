"""How the rows of a data set are to be read, where the user says it."""

from dataclasses import dataclass, replace
from functools import partial

from specgen.config import UserError, option, require
from specgen.prompts.formats import Format
from specgen.prompts.kinds import parse_field
from specgen.prompts.prompt import Prompt, question


@dataclass(frozen=True, kw_only=True)
class Reading:
    """``chat`` puts a text into the chat template as the user's message, or not; None: as its kind of row has it."""

    split: str | None = option(
        None,
        "Prompts",
        "Read this split of a data set on the hub, such as test, or of a directory laid out like one.",
        shown="that of a known data set, else the only one",
    )
    prompt_field: str | None = option(
        None,
        "Prompts",
        "The field of a row that is the prompt: a text, a list of the user's turns or of messages. a.b is field b of "
        "field a.",
        shown="recognised by the fields",
        metavar="NAME",
    )
    chat: bool | None = option(
        None,
        "Prompts",
        "A text is the user's message in the chat template, or is taken as it is.",
        off="raw",
        shown="as its kind of row has it",
    )

    def __post_init__(self) -> None:
        require(self.prompt_field != "", "prompt-field is empty: name a field of the rows")

    @property
    def is_open(self) -> bool:
        """Whether it is left to the rows."""
        return self.prompt_field is None and self.chat is None

    def format(self, known: Format) -> Format:
        """``known``, or the format of rows with the field that is asked for."""
        if self.prompt_field is None:
            return known
        return replace(known, parse=partial(parse_field, self.prompt_field), turns=self.prompt_field)

    def applied(self, prompt: Prompt) -> Prompt:
        """``prompt`` with its text in the chat template or without; ``UserError`` where that cannot be."""
        if self.chat is None:
            return prompt
        if prompt.endpoint is not None:
            raise UserError("the url of a batch row says whether it is a chat: leave out --chat and --raw")
        if self.chat:
            if prompt.token_ids:
                raise UserError("token ids cannot be put into a chat template: leave out --chat")
            return (
                prompt if prompt.text is None else replace(prompt, text=None, messages=question(prompt.text))
            )
        if len(prompt.messages) > 1 or prompt.follow_ups:
            raise UserError("several messages or turns need the chat template: leave out --raw")
        if prompt.messages:
            return replace(prompt, text=prompt.messages[0].content, messages=())
        return prompt


AS_IT_IS = Reading()
