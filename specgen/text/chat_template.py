"""Chat templates as programs: the names that they use, and the date that they see."""

import json
from collections.abc import Iterable
from datetime import date, datetime
from functools import lru_cache
from pathlib import Path

from jinja2 import meta
from jinja2.exceptions import TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Const, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from specgen.config import UserError, first_line, require

_DIRECTIVES = "aAbBcdejmpuUVwxXyYGHIMSfWDF"  # of ``strftime``, beside those with a dash: no leading zero
_DASHED = "dmjyHIMS"
# ``strftime_now`` is a function of transformers, of which none can be handed to a template: a macro takes its place.
_MACRO = (
    '{%% macro strftime_now(format) %%}{%% set known = %s %%}{%% for piece in format.split("%%") %%}'
    "{%% if loop.first %%}{{ piece }}"
    '{%% else %%}{%% set size = 2 if piece[:1] == "-" else 1 %%}'
    '{%% if piece[:size] not in known %%}{{ raise_exception("strftime_now has no %%" ~ piece[:size]) }}{%% endif %%}'
    "{{ known[piece[:size]] ~ piece[size:] }}{%% endif %%}{%% endfor %%}{%% endmacro %%}\n"
)


def today() -> str:
    """The date here, as ``2026-01-31``."""
    return datetime.now().date().isoformat()


def calls_for_date(directory: Path) -> bool:
    """Whether a chat template in a checkpoint's ``directory`` may write the date into its prompts."""
    files = [directory / "tokenizer_config.json", *directory.glob("chat_template*")]
    return any(b"strftime_now" in file.read_bytes() for file in files if file.is_file())


def require_inside(directory: Path) -> None:
    """``UserError`` for a chat template in a checkpoint's ``directory`` that is a link to a file elsewhere.

    Any text is a template, so that any file would find its way into prompts. The hub's cache links to its own store.
    """
    own = directory.resolve()
    places = (own, *((above / "blobs").resolve() for above in list(own.parents)[:2]))
    for file in (*directory.glob("chat_template*"), *directory.glob("additional_chat_templates/*")):
        found = file.resolve()
        require(
            any(found.is_relative_to(place) for place in places),
            f"{file} is a link to {found}, outside of the checkpoint: copy that file here if it is the template",
        )


def pin_date(template: str, day: str | None) -> str:
    """``template`` with ``strftime_now`` at 0:00 of ``day``, an ISO date; None: at the time of rendering."""
    if day is None or "strftime_now" not in template:
        return template
    then = datetime.combine(date.fromisoformat(day), datetime.min.time())
    names = [*_DIRECTIVES, *(f"-{each}" for each in _DASHED)]
    # the line break after the macro is dropped by Jinja, so that the template begins a line as before
    return _MACRO % json.dumps({name: then.strftime(f"%{name}") for name in names}) + template


@lru_cache(maxsize=16)
def require_compiled(template: str) -> None:
    """``UserError`` for a ``template`` that is no program, whatever the messages are."""
    try:
        _ENVIRONMENT.from_string(template)
    except Exception as error:  # of Jinja, or of Python, which compiles what Jinja makes of it
        line = f"line {error.lineno}: " if isinstance(error, TemplateSyntaxError) else ""
        raise UserError(
            f"the chat template cannot be compiled ({line}{first_line(error)}): fix it, or download the tokenizer again"
        ) from error


def require_known(template: str, names: Iterable[str]) -> None:
    """``UserError`` for ``names`` that ``template`` never looks up: they would be ignored in silence."""
    try:
        known = meta.find_undeclared_variables(_ENVIRONMENT.parse(template))
    except (TemplateError, RecursionError):
        return  # ``require_compiled`` says what is wrong with it
    unknown = [name for name in names if name not in known]
    others = sorted(known - _OURS)
    require(
        not unknown,
        f"chat-template-kwargs has {', '.join(unknown)}, which the chat template of this model does not use: "
        f"the names in it are {', '.join(others) or 'none'}",
    )


class _Generation(Extension):
    """The block ``generation`` that templates may have for training; here only so that they can be parsed."""

    tags = {"generation"}  # noqa: RUF012  # as jinja2 declares it

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_body", [Const(None)]), [], [], body).set_lineno(line)


_ENVIRONMENT = ImmutableSandboxedEnvironment(extensions=[_Generation, loopcontrols])
# What transformers hands to every template, and what it defines.
_OURS = {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"} | {
    *("raise_exception", "strftime_now", "dict", "namespace"),
    *("bos_token", "eos_token", "pad_token", "unk_token"),
}
