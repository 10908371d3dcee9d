"""A model pair in memory: its checkpoints opened once, its weights and tokenizer loaded."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from specgen.checkpoints.checkpoint import load_drafter, load_target, mtp_part, open_checkpoint
from specgen.checkpoints.tensor_reader import Checkpoint
from specgen.config import MTP, EngineConfig, SamplingParams
from specgen.core.peers import Peers
from specgen.device import Ranks, use
from specgen.engine.choices import DTYPES, Checkpoints, needed_modules
from specgen.engine.worker_group import peers_of
from specgen.models.config_keys import listed
from specgen.models.families import unread
from specgen.models.protocols import Head, Target
from specgen.ops.jit_modules import compiled_meanwhile
from specgen.record.startup import phase
from specgen.report.display import from_here
from specgen.text.tokenizer import Tokenizer, load_tokenizer

_GREEDY = SamplingParams()


@dataclass(frozen=True, kw_only=True)
class Models:
    """Weights and tokenizer: what engines over the same pair share, and the checkpoints they came from.

    Of weights, this rank's share of what it and its ``peers`` hold together.
    """

    target: Target
    head: Head | None
    tokenizer: Tokenizer
    checkpoints: Checkpoints
    peers: Peers = field(default_factory=Peers)

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on what may not be meant."""
        tokens, vocabulary = self.tokenizer.vocab_size, self.target.config.vocab_size
        if tokens <= vocabulary:
            return ()
        return (
            f"the tokenizer has {tokens:,} tokens and the model's vocabulary {vocabulary:,}: if it is this model's, "
            "prompts with the tokens beyond fail; if not, all texts are wrong",
        )

    @property
    def synthetic(self) -> bool:
        """Whether the target says that its weights were made for measurements and not trained."""
        return _is_synthetic(self.checkpoints["model"])


def described(model: str, checkpoint: Checkpoint) -> str:
    """``model`` as a report names it: whether its weights were only written to be timed belongs to it."""
    return from_here(model) + (" (synthetic weights)" if _is_synthetic(checkpoint) else "")


def _is_synthetic(checkpoint: Checkpoint) -> bool:
    return bool(checkpoint.config.get("synthetic_weights", False))


def open_checkpoints(config: EngineConfig) -> Checkpoints:
    """The checkpoints of ``config``, headers only; of a hub id, what is downloaded. Once in a command is enough."""
    target = open_checkpoint(config.model)
    if config.head is None:
        return {"model": target}
    return {
        "model": target,
        "drafter": mtp_part(target) if config.head == MTP else open_checkpoint(config.head),
    }


def load_chat_tokenizer(config: EngineConfig, checkpoints: Checkpoints) -> Tokenizer:
    """The target's tokenizer, whose chats are rendered as ``config`` says; ``UserError`` if they cannot be."""
    return load_tokenizer(str(checkpoints["model"].path)).with_template_kwargs(config.template_kwargs)


def load_models(config: EngineConfig, checkpoints: Checkpoints, expected: SamplingParams = _GREEDY) -> Models:
    """Read target, head (if one is to draft) and tokenizer of a resolved ``config``.

    Meanwhile the kernels are compiled that engines for ``expected`` requests need. With ``tensor_parallel`` the other
    ranks are started here, and end when nothing refers to the models any more.
    """

    for name, checkpoint in checkpoints.items():
        if name == "model" or config.head != MTP:  # which has its target's file
            _note_unread(checkpoint)

    def load() -> Models:
        with phase("weights"), peers.together("load", config):
            return load_share(config, checkpoints, peers)

    with compiled_meanwhile(needed_modules(config, checkpoints, expected)):
        with phase("ranks"):
            peers = peers_of(config)
        if peers.ranks.size == 1:
            return load()
    return load()  # only now: shares are loaded with the kernel of their sum


def _note_unread(checkpoint: Checkpoint) -> None:
    keys = unread(checkpoint.config, checkpoint.tensors.keys())
    if keys:
        text = "%s: nothing reads %s in config.json: results are those without %s"
        them = "them" if len(keys) > 1 else "it"
        logging.getLogger("specgen").warning(text, checkpoint.name, listed(keys), them)


def load_share(config: EngineConfig, checkpoints: Checkpoints, peers: Peers) -> Models:
    """``load_models`` for one rank."""
    device = torch.device(config.device)
    use(device)
    return _load(config, checkpoints, device, peers, peers.ranks)


def outline(config: EngineConfig, checkpoints: Checkpoints) -> Models:
    """As ``load_models`` without reading a weight: what can be known before that. Refuses what it would refuse."""
    return _load(config, checkpoints, torch.device("meta"), Peers(), Ranks(size=config.tensor_parallel))


def _load(
    config: EngineConfig, checkpoints: Checkpoints, device: torch.device, peers: Peers, ranks: Ranks
) -> Models:
    dtype, tokenizer = DTYPES[config.dtype], load_chat_tokenizer(config, checkpoints)
    target, head = load_target(checkpoints["model"], dtype, device, ranks), None
    if config.head is not None:
        head = load_drafter(checkpoints["drafter"], target)
    return Models(target=target, head=head, tokenizer=tokenizer, checkpoints=checkpoints, peers=peers)


@dataclass
class OneTarget:
    """Loads pairs over one target, whose weights are read once; a head stays in memory beside those before it."""

    first: Callable[[EngineConfig, Checkpoints], Models] = load_models  # loads the target, with a head
    _first: Models | None = None
    _heads: dict[str, Head] = field(default_factory=dict)

    def load(self, config: EngineConfig, checkpoints: Checkpoints) -> Models:
        """As ``load_models``, for configurations of one model, device and number format."""
        if self._first is None:
            self._first = self.first(config, checkpoints)
            if config.head is not None and self._first.head is not None:
                self._heads[config.head] = self._first.head
        if config.head is not None and config.head not in self._heads:
            with self._first.peers.together("load", config):
                self._heads[config.head] = load_drafter(checkpoints["drafter"], self._first.target)
        return replace(
            self._first,
            head=None if config.head is None else self._heads[config.head],
            tokenizer=self._first.tokenizer.with_template_kwargs(config.template_kwargs),
            checkpoints=checkpoints,
        )
