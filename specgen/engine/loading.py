"""A model pair in memory: its checkpoints opened once, its weights and tokenizer loaded."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from specgen.checkpoints.checkpoint import load_drafter, load_target, mtp_part, open_checkpoint
from specgen.checkpoints.lora import with_lora
from specgen.checkpoints.tensor_reader import Checkpoint
from specgen.config import MTP, EngineConfig, SamplingParams, require
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
_NONE: Checkpoints = {}


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


def open_checkpoints(config: EngineConfig, opened: Checkpoints = _NONE) -> Checkpoints:
    """The checkpoints of ``config``, headers only; of a hub id, what is downloaded.

    Once in a command is enough: those of ``opened`` are taken whose files have not changed.
    """

    def open_(part: str, name: str, lora: str | None = None) -> Checkpoint:
        known = opened.get(part)
        if known is not None and (known.name, known.lora) == (name, lora) and known.is_unchanged():
            return known
        return open_checkpoint(name) if lora is None else with_lora(open_checkpoint(name), lora)

    target = open_("model", config.model, config.lora)
    if config.head is None:
        return {"model": target}
    return {
        "model": target,
        "drafter": mtp_part(target) if config.head == MTP else open_("drafter", config.head),
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
        with phase("weights"), peers.loading(config):
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
        head = _drafting(checkpoints["drafter"], target, tokenizer, config)
    return Models(target=target, head=head, tokenizer=tokenizer, checkpoints=checkpoints, peers=peers)


def _drafting(checkpoint: Checkpoint, target: Target, tokenizer: Tokenizer, config: EngineConfig) -> Head:
    """The head of ``checkpoint``, or the draft model, whose tokens must be those of ``tokenizer``."""
    head = load_drafter(checkpoint, target, config.draft_lm_head == "fp8")
    if head.config.is_model:
        reason = tokenizer.difference(load_tokenizer(str(checkpoint.path)))
        require(reason is None, f"{checkpoint.name} cannot draft for this target: {reason}")
    return head


def over_target(models: Models, config: EngineConfig, checkpoints: Checkpoints) -> Models:
    """``models`` for a resolved ``config`` of the same target; the head is read unless ``models`` has it.

    ``UserError`` where the target's files, its number format, device or ranks are others.
    """
    target, held = models.target, models.checkpoints["model"]
    for name, ours, asked in (
        ("model", held.name, config.model),
        ("lora", held.lora, config.lora),
        ("dtype", str(target.dtype).removeprefix("torch."), config.dtype),
        ("device", str(target.device), config.device),
        ("tensor-parallel", models.peers.ranks.size, config.tensor_parallel),
    ):
        differs = held.state != checkpoints["model"].state if name == "model" else ours != asked
        changed = f"the files of model {asked} have changed since they were loaded"
        require(
            not differs,
            (changed if ours == asked else f"{name} is {asked} and the models were loaded with {ours}")
            + ": use the same, or make the engine without models, which loads them",
        )
    if config.head is not None and (
        models.head is None
        or _head_of(models.checkpoints) != _head_of(checkpoints)
        or models.head.config.fp8_output != (config.draft_lm_head == "fp8")
    ):
        if config.head != MTP and models.peers.ranks.rank == 0:
            _note_unread(checkpoints["drafter"])
        with models.peers.loading(config):
            head = _drafting(checkpoints["drafter"], target, models.tokenizer, config)
        models = replace(models, head=head, checkpoints=checkpoints)
    if models.tokenizer.template_kwargs == config.template_kwargs:
        return models
    return replace(models, tokenizer=models.tokenizer.with_template_kwargs(config.template_kwargs))


def _head_of(checkpoints: Checkpoints) -> object:
    """What tells heads apart, also parts of one file."""
    head = checkpoints.get("drafter")
    return head and (head.state, head.tensors.keys())


@dataclass
class OneTarget:
    """Loads pairs over one target, whose weights are read once; a head stays in memory as long as its files do."""

    first: Callable[[EngineConfig, Checkpoints], Models] = load_models  # loads the target, with a head
    _first: Models | None = None
    _with_head: dict[tuple[str | None, str], Models] = field(default_factory=dict)

    def load(self, config: EngineConfig, checkpoints: Checkpoints) -> Models:
        """As ``load_models``, for configurations of one model, device and number format."""
        head = config.head, config.draft_lm_head
        if self._first is None:
            self._first = self.first(config, checkpoints)
            models = self._first
        else:
            models = over_target(self._with_head.get(head, self._first), config, checkpoints)
        if config.head is None:
            return replace(models, head=None, checkpoints=checkpoints)
        kept = self._with_head.items()
        self._with_head = {name: each for name, each in kept if each.checkpoints["drafter"].path.exists()}
        self._with_head[head] = models
        return models
