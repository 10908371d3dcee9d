"""Errors planted in a reference of a head, each of which the tests must be able to see."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.reference_heads import (
    ReferenceDFlash,
    ReferenceEagle1,
    ReferenceEagle3,
    ReferenceEagleLlama4,
    ReferencePEagle,
)

Fits = Callable[[Any], bool]  # whether a head has what the error is about
Plant = Callable[[Any], None]
LAYER = "layers.0"


def swapped_features(head: Any) -> None:
    fuse = head.fuse
    head.fuse = lambda features: fuse(features[::-1])


def shifted_aux(by: int) -> Plant:
    def plant(head: Any) -> None:
        head.aux = [min(max(index + by, 0), head.target.num_layers) for index in head.aux]

    return plant


def late_drafts(head: Any) -> None:
    """One position between the rows of the text and those of the drafts; a shift of all would change nothing."""

    def positions(num_rows: int, num_drafted: int) -> Tensor:
        at = torch.arange(num_rows + num_drafted)
        return at + (at >= num_rows)

    head.positions = positions


def without_norm(*names: str) -> tuple[Fits, Plant]:
    def plant(head: Any) -> None:
        norm = head.norm
        head.norm = lambda x, name: x if name in names else norm(x, name)

    return (lambda head: f"{names[0]}.weight" in head.t), plant


def without_layer_norm(index: int, name: str) -> tuple[Fits, Plant]:
    def plant(head: Any) -> None:
        setattr(head.layers[index], name, torch.nn.Identity())

    return (lambda head: head.num_layers > index), plant


def without_tensor(ending: str) -> tuple[Fits, Plant]:
    """Without a bias."""

    def plant(head: Any) -> None:
        head.t = {name: x * 0 if name.endswith(ending) else x for name, x in head.t.items()}
        head.layers = [head._layer(index) for index in range(head.num_layers)]

    return (lambda head: any(name.endswith(ending) for name in head.t)), plant


def assign(**changes: Callable[[Any], Any]) -> Plant:
    """Replace attributes of a head by functions of it."""

    def plant(head: Any) -> None:
        for name, value in {name: change(head) for name, change in changes.items()}.items():
            setattr(head, name, value)

    return plant


def flipped(name: str) -> Plant:
    return assign(raw=lambda head: head.raw | {name: not head.raw.get(name)})


def moved_windows(by: int) -> tuple[Fits, Plant]:
    plant = assign(windows=lambda head: [window and window + by for window in head.windows])
    return (lambda head: any(head.windows)), plant


def is_eagle1(head: Any) -> bool:
    return isinstance(head, ReferenceEagle1)


def is_peagle(head: Any) -> bool:
    return isinstance(head, ReferencePEagle)


def reads_streams(head: Any) -> bool:
    return isinstance(head, ReferenceEagle3) and not head.reads_output


def steps_by_itself(head: Any) -> bool:
    return isinstance(head, ReferenceEagle3) and not is_peagle(head)


def always(head: Any) -> bool:
    return True


ERRORS: dict[str, tuple[Fits, Plant]] = {
    "feature order": (lambda head: reads_streams(head) and len(head.aux) > 1, swapped_features),
    "one layer too early": (reads_streams, shifted_aux(-1)),
    "one layer too late": (lambda head: reads_streams(head) and min(head.aux) < 6, shifted_aux(1)),
    "state before the final norm": (
        lambda head: is_eagle1(head) or head.reads_output,
        assign(hidden=lambda head: lambda streams, output: streams[-1]),
    ),
    "tokens not shifted": (always, assign(rows=lambda head: lambda ids, hidden: (ids[:-1], hidden[:-1]))),
    "states shifted": (always, assign(rows=lambda head: lambda ids, hidden: (ids[1:], hidden[1:]))),
    "late drafts": (always, late_drafts),
    "no norm of the embedding": without_norm(f"{LAYER}.input_layernorm"),
    "no norm of the state": without_norm(f"{LAYER}.hidden_norm"),
    "no final norm": without_norm("norm"),
    "no norm of the features": without_norm("input_norm"),
    "no norms of features": without_norm("fc_norm.0", *(f"fc_norm.{index}" for index in range(1, 5))),
    "no norm before the MLP": without_layer_norm(0, "post_attention_layernorm"),
    "no norm before a later layer": without_layer_norm(1, "input_layernorm"),
    "no norm before a later MLP": without_layer_norm(1, "post_attention_layernorm"),
    "residual of the other state": (
        lambda head: isinstance(head, ReferenceEagle3),
        flipped("norm_before_residual"),
    ),
    "recycled at the other side of the norm": (steps_by_itself, flipped("norm_output")),
    "recycled normed": (
        is_eagle1,
        assign(recycled=lambda head: lambda out: torch.nn.functional.rms_norm(out, out.shape[-1:])),
    ),
    "last layer left out": (
        lambda head: head.num_layers > 1,
        assign(layers=lambda head: head.layers[:-1], windows=lambda head: head.windows[:-1]),
    ),
    "layer order": (
        lambda head: head.num_layers > 2,
        assign(layers=lambda head: [*head.layers[:-2], head.layers[-1], head.layers[-2]]),
    ),
    "window order": (
        lambda head: len(set(head.windows)) > 1,
        assign(windows=lambda head: [*head.windows[1:], head.windows[0]]),
    ),
    "window one shorter": moved_windows(-1),
    "window one longer": moved_windows(1),
    "state before embedding": (
        is_eagle1,
        assign(t=lambda head: head.t | {"fc.weight": head.t["fc.weight"].roll(64, 1)}),
    ),
    "no bias of fc": without_tensor("fc.bias"),
    "no bias of q": without_tensor("q_proj.bias"),
    "no bias of k": without_tensor("k_proj.bias"),
    "no bias of v": without_tensor("v_proj.bias"),
    "no bias of o": without_tensor("o_proj.bias"),
    "no bias of the MLP": without_tensor("down_proj.bias"),
    "the target's embedding": (
        lambda head: "embed_tokens.weight" in head.t and head.embedding.shape == head.target.embedding.shape,
        assign(embedding=lambda head: head.target.embedding),
    ),
    "draft ids taken for the target's": (lambda head: head.ids is not None, assign(ids=lambda head: None)),
    "another mask token": (is_peagle, assign(mask_token=lambda head: lambda: 4)),
    "mask without features": (
        is_peagle,
        assign(t=lambda head: head.t | {"mask_hidden": 0 * head.t["mask_hidden"]}),
    ),
}


def is_dspark(kind: str) -> Fits:
    return lambda head: head.kind == kind


def is_second(head: Any) -> bool:
    return "selector_top_k" in head.settings


def looks_ahead(head: Any) -> bool:
    return not all(head.causal)


def fills_in(head: Any) -> bool:
    return not head.anchor


def looks_ahead_in_windows(head: Any) -> bool:
    return any(window and not causal for window, causal in zip(head.windows, head.causal, strict=True))


def narrower_than_blocks(head: Any) -> bool:
    return looks_ahead_in_windows(head) and min(filter(None, head.windows)) < head.depth


def seen_by(mask: Callable[[Tensor, Tensor, int], Tensor]) -> Plant:
    """In layers with a window: of the rows' and all positions, and the window."""

    def plant(head: Any) -> None:
        real = head.seen

        def seen(num_states: int, num_rows: int, index: int) -> Tensor:
            rows, columns = torch.arange(num_rows)[:, None] + num_states, torch.arange(num_states + num_rows)
            window = head.windows[index]
            return real(num_states, num_rows, index) if window is None else mask(rows, columns, window)

        head.seen = seen

    return plant


def without_text(head: Any) -> Any:
    def seen(num_states: int, num_rows: int, index: int) -> Tensor:
        return torch.cat((torch.zeros(num_rows, num_states), torch.ones(num_rows, num_rows)), -1).bool()

    return seen


# Of heads that draft a block
_OF_LAYERS = ("no final norm", "no norm before a later layer", "last layer left out", "window one shorter")
_OF_LAYERS += (
    "window one longer",
    *(f"no bias of {each}" for each in "qkv"),
    "draft ids taken for the target's",
)
DFLASH_ERRORS: dict[str, tuple[Fits, Plant]] = {
    **{name: ERRORS[name] for name in _OF_LAYERS},
    "one layer too early": (lambda head: min(head.aux) > 0, shifted_aux(-1)),
    "one layer too late": (lambda head: max(head.aux) < head.target.num_layers, shifted_aux(1)),
    "feature order": (always, assign(aux=lambda head: head.aux[::-1])),
    "block one position late": (always, assign(first=lambda head: lambda num_states: num_states + 1)),
    "block one position early": (always, assign(first=lambda head: lambda num_states: num_states - 1)),
    "causal where it looks ahead": (looks_ahead, assign(causal=lambda head: [True] * head.num_layers)),
    "looking ahead where it is causal": (
        lambda head: any(head.causal),
        assign(causal=lambda head: [False] * head.num_layers),
    ),
    "a block's windows reach back from its last row": (
        looks_ahead_in_windows,
        seen_by(lambda rows, columns, window: columns > rows[-1:] - window),
    ),
    "a block's windows reach back from its first row": (
        looks_ahead_in_windows,
        seen_by(lambda rows, columns, window: columns > rows[:1] - window),
    ),
    "windows reach back alone": (
        narrower_than_blocks,
        seen_by(lambda rows, columns, window: columns > rows - window),
    ),
    "no windows": (lambda head: any(head.windows), assign(windows=lambda head: [None] * head.num_layers)),
    "norm of the inputs on the text": (
        always,
        assign(context=lambda head: lambda states, layer: layer.input_layernorm(states)),
    ),
    "the block sees itself alone": (always, assign(seen=without_text)),
    "the newest state left out": (
        always,
        assign(text=lambda head: lambda tokens, text=head.text: text(tokens)[:-1]),
    ),
    "the newest token's row drafts": (fills_in, assign(drafting=lambda head: lambda rows: rows[:-1])),
    "all are masks": (
        always,
        assign(block=lambda head: lambda newest, block=head.block: block(head.settings["mask_token_id"])),
    ),
    "another mask token": (always, assign(settings=lambda head: head.settings | {"mask_token_id": 4})),
    "no norm of the features": without_norm("hidden_norm"),
    "no norm before the first layer": without_layer_norm(0, "input_layernorm"),
    "no norm before an MLP": without_layer_norm(0, "post_attention_layernorm"),
    "the target's embedding": (
        lambda head: head.embedding is not head.target.embedding,  # of all tokens or of the mask
        assign(embedding=lambda head: head.target.embedding),
    ),
    "the target's output weights": (
        lambda head: "lm_head.weight" in head.t and head.ids is None,
        assign(logits=lambda head: lambda out: out @ head.target.lm_head.T),
    ),
    "rows of a block before it": (
        is_second,
        assign(
            convolved=lambda head: (
                lambda x, by, *rest, real=head.convolved: real(
                    x.roll(1, 0), by, *rest
                )  # the last comes first
            )
        ),
    ),
    "weights of the row behind": (
        is_second,
        assign(convolved=lambda head: lambda x, by, *rest, real=head.convolved: real(x, x, *rest)),
    ),
    "no convolution": (is_second, assign(convolved=lambda head: lambda x, *rest: x)),
    "kernels exchanged": (
        is_second,
        assign(
            convolved=lambda head: (
                lambda x, by, index, part, which, real=head.convolved: real(x, by, index, part, 1 - which)
            )
        ),
    ),
    "no selector": (is_second, assign(selected=lambda head: lambda logits, row, before: logits)),
    "selected by the newest token": (
        is_second,
        assign(
            selected=lambda head: (
                lambda logits, row, before, real=head.selected: real(logits, row, head.newest)
            )
        ),
    ),
    "no scale of embeddings": (is_second, assign(scaled=lambda head: lambda embedded: embedded)),
    "no cap of logits": (is_second, assign(capped=lambda head: lambda logits: logits)),
    "no Markov head": (lambda head: bool(head.kind), assign(kind=lambda head: "")),
    "no gate": (is_dspark("gated"), assign(kind=lambda head: "vanilla")),
    "nothing is carried on": (
        is_dspark("rnn"),
        assign(known=lambda head: lambda before, row, memory, real=head.known: real(before, row, 0 * memory)),
    ),
    "the token before is the newest": (
        lambda head: bool(head.kind),
        assign(
            known=lambda head: lambda before, row, memory, real=head.known: real(head.newest, row, memory)
        ),
    ),
}


def normed(head: Any) -> bool:
    return bool(head.layer["use_qk_norm"])


def unnormed(head: Any) -> None:
    for layer in head.layers:
        del layer.self_attn.qk_norm


def halves(head: Any) -> None:
    """The pairs that are rotated are of a head's halves, as in a Llama."""
    for layer in head.layers:
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            rows = projection.weight.unflatten(0, (-1, 2, head.layer["head_dim"] // 2))
            rows = rows.transpose(1, 2).flatten(0, 2)
            projection.weight = torch.nn.Parameter(rows)


def chunk_of(change: Callable[[int], int]) -> Plant:
    return assign(chunk=lambda head: change(head.chunk))


def a_window(head: Any) -> None:
    def mask(positions: Tensor) -> Tensor:
        back = positions[:, None] - positions
        return torch.zeros(back.shape).masked_fill((back < 0) | (back >= head.chunk), float("-inf"))[
            None, None
        ]

    head.mask = mask


_OF_EVERY_HEAD = ("state before the final norm", "tokens not shifted", "states shifted", "late drafts")
# Of EAGLE heads of a Llama-4, whose layers have their own norms
LLAMA4_ERRORS: dict[str, tuple[Fits, Plant]] = {
    **{name: ERRORS[name] for name in _OF_EVERY_HEAD},
    **{name: ERRORS[name] for name in ("no final norm", "state before embedding", "last layer left out")},
    **{name: ERRORS[name] for name in ("no norm before the MLP", "no norm before a later layer")},
    "no norm before the first layer": without_layer_norm(0, "input_layernorm"),
    "recycled before the norm": (always, assign(recycled=lambda head: lambda out: out)),
    "no norm of q and k": (normed, unnormed),
    "pairs as halves": (always, halves),
    "no chunks": (always, chunk_of(lambda chunk: 1 << 20)),
    "another chunk": (always, chunk_of(lambda chunk: chunk - 1)),
    "a window for a chunk": (always, a_window),
    "the target's output weights": (
        lambda head: "lm_head.weight" in head.t,
        assign(t=lambda head: {name: x for name, x in head.t.items() if name != "lm_head.weight"}),
    ),
    "the target's embedding": ERRORS["the target's embedding"],
}


def errors_of(head: Any) -> dict[str, tuple[Fits, Plant]]:
    """Those that are about heads of its kind."""
    if isinstance(head, ReferenceEagleLlama4):
        return LLAMA4_ERRORS
    return DFLASH_ERRORS if isinstance(head, ReferenceDFlash) else ERRORS


def without_mtp_norm(name: str) -> tuple[Fits, Plant]:
    return always, assign(
        norm=lambda head: (
            lambda x, index, which, real=head.norm: x if which == name else real(x, index, which)
        )
    )


def several_mtp_layers(head: Any) -> bool:
    return len(head.layers) > 1


MTP_ERRORS: dict[str, tuple[Fits, Plant]] = {
    **{name: ERRORS[name] for name in _OF_EVERY_HEAD[1:]},
    "state before embedding": (
        always,
        assign(joined=lambda head: lambda embedded, hidden: torch.cat([hidden, embedded], -1)),
    ),
    "no norm of the embedding": without_mtp_norm("enorm"),
    "no norm of the state": without_mtp_norm("hnorm"),
    "no norm behind the layer": without_mtp_norm("shared_head.norm"),
    "recycled before the norm": (always, assign(recycled=lambda head: lambda out, index: out)),
    "state before the target's norm": (
        always,
        assign(hidden=lambda head: lambda streams, output: streams[-1]),
    ),
    "always the first layer": (several_mtp_layers, assign(turn=lambda head: lambda step: 0)),
    "layers backwards": (several_mtp_layers, assign(turn=lambda head: lambda step: -step)),
    "the target's output weights": (
        lambda head: len(head.layers) == 1 and "shared_head.head.weight" in head.layers[0],
        assign(lm_head=lambda head: lambda index: head.target.lm_head),
    ),
}
