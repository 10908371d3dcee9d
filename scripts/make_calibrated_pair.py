"""Writes a full-size target and draft heads with synthetic weights, whose text and acceptance are known in advance.

    python scripts/make_calibrated_pair.py OUT --shape llama-3.1-8b --accept 0.75
    python scripts/make_calibrated_pair.py OUT --head eagle3 eagle1 eagle3-2 peagle-2
    python scripts/make_calibrated_pair.py OUT --head llama-3.2-1b    # a smaller model as drafter
    python scripts/make_calibrated_pair.py OUT --shape gpt-oss-20b --expert-overlap 0.5
    python scripts/make_calibrated_pair.py OUT --weights fp8    # or fp8-block
    python scripts/make_calibrated_pair.py OUT --confidence trained    # a head that is as sure as a trained one
    python scripts/make_calibrated_pair.py OUT --shape qwen3-30b-a3b --layers 24    # 31 GB; all 48 take 61 GB
    python scripts/make_calibrated_pair.py OUT --shape qwen3-30b-a3b --weights fp8-block    # 31 GB
    python scripts/make_calibrated_pair.py OUT --shape glm-4.7-flash --weights fp8-block    # 33 GB; 64 GB in bf16
    python scripts/make_calibrated_pair.py OUT --shape qwen3.6-27b --weights fp8-block    # 30 GB; 55 GB in bf16
    python scripts/make_calibrated_pair.py OUT --shape qwen3.6-35b-a3b --layers 20    # a multiple of 4
    python scripts/make_calibrated_pair.py OUT --shape llama-4-scout --layers 8 --head eagle-llama4    # 42 GB
    python scripts/make_calibrated_pair.py OUT --shape gemma-4-12b --head assistant dflash-5    # 29 GB
    python scripts/make_calibrated_pair.py OUT --shape gemma-4-31b --weights fp8-block    # 37 GB; 66 GB in bf16
    python scripts/make_calibrated_pair.py OUT --shape gemma-4-26b-a4b --head assistant    # 53 GB
    python scripts/make_calibrated_pair.py OUT --shape gemma-4-e4b --head assistant    # 17 GB; e2b: 10 GB

``OUT/target`` and ``OUT/drafter`` are checkpoints in the public formats, ``OUT/cycle.json`` is the text they generate
(see calibrated_weights.py, calibrated_heads.py and calibrated_cycle.py). They are for measuring
speed, not quality. Several heads for one target are in directories of their names: ``OUT/eagle3``, ``OUT/eagle1``. The
targets of glm-4.7-flash and of qwen3.6 hold an MTP layer that drafts as heads do (``--drafter mtp``), and get no head
unless asked. Of the layers of qwen3.6 every fourth attends; the others have a recurrent state (calibrated_hybrids.py).
The name of a dense shape with the target's vocabulary is a head too: a draft model, which is a checkpoint like the
target's. Gemma 4's ``assistant`` drafts with the target's keys and values (calibrated_gemma4.py).

In a mixture of experts all are chosen equally often, and ``--expert-overlap`` says how alike neighbouring tokens choose
(see calibrated_mixtures.py). Fewer ``--layers`` save disk and memory; each costs what it does in the whole model.
"""

import argparse
import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast, get_args

import torch
from calibrated_codes import Codes
from calibrated_cycle import Confidence, Cycle
from calibrated_gemma4 import Gemma4MixtureLayers, assistant_tensors, gemma4_layer, layer_inputs
from calibrated_heads import (
    block_tensors,
    eagle1_tensors,
    eagle3_tensors,
    eagle_llama4_tensors,
    peagle_tensors,
)
from calibrated_hybrids import HybridMixtureLayers, hybrid_layer, hybrid_mtp_tensors, plain_modules
from calibrated_mixtures import (
    LatentLayers,
    Llama4Layers,
    MixtureLayers,
    common_share,
    mtp_tensors,
)
from calibrated_shapes import (
    SHAPES,
    Gemma4MixtureShape,
    Gemma4Shape,
    GptOssShape,
    HybridMixtureShape,
    HybridShape,
    LatentShape,
    Llama4Shape,
    Mixture,
    Shape,
)
from calibrated_weights import Fp8Format, Fp8Layers, Layer, Named, Source, dense_layer, target_tensors
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SHARD_BYTES = 2 * 10**9
WRITERS = 4  # files that are written while the next one is made
LEAST_LAYERS = 7  # for which EAGLE3's default features come from three different layers
CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"


@dataclass(frozen=True, kw_only=True)
class HeadKind:
    """A draft head to write: its name, ``config.json`` and tensors.

    ``config`` raises ``ValueError`` for a target's shape that it does not fit.
    """

    name: str
    config: Callable[[Shape], dict[str, Any]]
    tensors: Callable[[Shape, Codes, Cycle, Source], Iterator[Named]]
    model: Shape | None = None  # of a draft model, which also runs by itself

    @classmethod
    def find(cls, name: str) -> "HeadKind":
        """``eagle3``, ``eagle3-2`` (layers), ``eagle1``, ``peagle-2``, ``dflash-5``, ``dspark-5``, or a shape's name.

        ``ValueError`` for another name.
        """
        if name in SHAPES:
            return cls._draft_model(name, SHAPES[name])
        kind, dash, suffix = name.partition("-")
        layers = int(suffix) if suffix.isdecimal() else 0 if dash else 1
        if layers and kind == "eagle3":
            tensors = partial(eagle3_tensors, layers)
            return cls(name=name, config=lambda shape: shape.eagle3_config(layers), tensors=tensors)
        if layers and kind == "peagle":
            tensors = partial(peagle_tensors, layers)
            return cls(name=name, config=lambda shape: shape.peagle_config(layers), tensors=tensors)
        if layers and kind in ("dflash", "dspark"):
            settings = layers, kind == "dspark"
            return cls(
                name=name,
                config=lambda shape: shape.block_config(*settings),
                tensors=partial(block_tensors, *settings),
            )
        if name == "eagle1":
            return cls(name=name, config=Shape.eagle1_config, tensors=eagle1_tensors)
        if name == "eagle-llama4":
            return cls(name=name, config=_eagle_llama4_config, tensors=eagle_llama4_tensors)
        if name == "assistant":
            return cls(name=name, config=_assistant_config, tensors=assistant_tensors)
        raise ValueError(
            f"no head {name!r}: use eagle3, eagle1, eagle-llama4, assistant, peagle, dflash or dspark; eagle3-2 or "
            "dflash-5 for more layers; llama-3.2-1b for a draft model"
        )

    @classmethod
    def _draft_model(cls, name: str, model: Shape) -> "HeadKind":
        """A target of the same text that takes unknown tokens for others, as heads do."""

        def config(shape: Shape) -> dict[str, Any]:
            if type(model) is not Shape:
                raise ValueError(f"head is {name}: as a draft model use a dense Llama or Qwen")
            if model.vocab_size != shape.vocab_size:
                raise ValueError(
                    f"head is {name}, of {model.vocab_size:,} tokens, and the target has {shape.vocab_size:,}: use a "
                    "shape of the same vocabulary"
                )
            return model.target_config()

        def tensors(_shape: Shape, _codes: Codes, cycle: Cycle, source: Source) -> Iterator[Named]:
            embedding = source.stretches(model.vocab_size, model.hidden_size, model.head_dim)
            return target_tensors(model, embedding, cycle.guess, source)

        return cls(name=name, config=config, tensors=tensors, model=model)


def _eagle_llama4_config(shape: Shape) -> dict[str, Any]:
    if not isinstance(shape, Llama4Shape):
        raise ValueError("head is eagle-llama4, and the shape no Llama-4: use --shape llama-4-scout")
    return shape.eagle_llama4_config()


def _assistant_config(shape: Shape) -> dict[str, Any]:
    if not isinstance(shape, Gemma4Shape):
        raise ValueError("head is assistant, and the shape no Gemma 4: use --shape gemma-4-12b")
    return shape.assistant_config()


def write_pair(
    out: Path,
    shape: Shape,
    cycle: Cycle,
    source: Source,
    heads: Sequence[HeadKind] = (HeadKind.find("eagle3"),),
    layer: Layer | None = None,
    probabilities: Mapping[int, float] | None = None,
) -> None:
    """Write all checkpoints and the cycle below ``out``; ``WRITERS`` + 1 shards and three tables are in memory.

    ``layer`` makes the tensors of one layer of the target; None: a dense one. ``probabilities`` are those that a head
    with its own ``lm_head`` has of its guess after each token; None: nearly 1.
    """
    layer = layer or partial(dense_layer, shape)
    folder = out / "target"
    folder.mkdir(parents=True, exist_ok=True)
    cycle.write(out)
    codes = replace(Codes.draw(shape, cycle, source), probabilities=probabilities or {})
    tensors = list(target_tensors(shape, codes.embedding, cycle.succ, source, layer))
    if isinstance(shape, Gemma4Shape):
        tensors += layer_inputs(shape, source)
    if isinstance(shape, LatentShape):
        tensors += layer(f"model.layers.{shape.num_layers}.", source)
        tensors += mtp_tensors(shape, codes, cycle, source)
    if isinstance(shape, HybridShape):
        tensors += layer("mtp.layers.0.", source)
        tensors += hybrid_mtp_tensors(shape, codes, source)
    write_tensors(folder, tensors, SHARD_BYTES)
    quantization = layer.config if isinstance(layer, Fp8Layers) else {}
    _write_json(folder / "config.json", shape.target_config() | quantization)
    _write_text_files(folder, shape, cycle)
    for head in heads:
        folder = out / ("drafter" if len(heads) == 1 else head.name)
        folder.mkdir(exist_ok=True)
        write_tensors(folder, list(head.tensors(shape, codes, cycle, source)), SHARD_BYTES)
        _write_json(folder / "config.json", head.config(shape))
        if head.model is not None:
            _write_text_files(folder, head.model, cycle)


def write_tensors(folder: Path, tensors: list[Named], shard_bytes: int) -> None:
    """Safetensors files of at most ``shard_bytes`` (or one tensor) each, with an index if there are several."""
    shards = list(_shards(tensors, shard_bytes))
    if len(shards) == 1:
        _save({folder / "model.safetensors": shards[0]})
        return
    files = {
        f"model-{number:05}-of-{len(shards):05}.safetensors": shard
        for number, shard in enumerate(shards, start=1)
    }
    _save({folder / file: shard for file, shard in files.items()})
    weight_map = {named.name: file for file, shard in files.items() for named in shard}
    total = sum(_num_bytes(named) for named in tensors)
    _write_json(
        folder / "model.safetensors.index.json",
        {"metadata": {"total_size": total}, "weight_map": weight_map},
    )


def _write_text_files(folder: Path, shape: Shape, cycle: Cycle) -> None:
    """What a model needs beside tensors and ``config.json``.

    Its tokenizer has a word for each id, ``w17`` for 17; any other is the text's first token, so any prompt works. A
    token's text is the word behind a space, whatever stands around it: a constraint can be compiled for it.
    """
    _write_json(folder / "generation_config.json", shape.generation_config())
    words = [f"▁w{token}" for token in range(shape.vocab_size)]
    vocabulary = {word: token for token, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=words[cycle.tokens[0]]))
    spaces = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), spaces])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": words[shape.bos_token_id],
            "eos_token": words[shape.eos_token_ids[0]],
            "model_max_length": shape.max_positions,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def _shards(tensors: Iterable[Named], shard_bytes: int) -> Iterator[list[Named]]:
    shard: list[Named] = []
    size = 0
    for named in tensors:
        if shard and size + _num_bytes(named) > shard_bytes:
            yield shard
            shard, size = [], 0
        shard.append(named)
        size += _num_bytes(named)
    yield shard


def _num_bytes(named: Named) -> int:
    return torch.Size(named.shape).numel() * named.dtype.itemsize


def _save(files: Mapping[Path, list[Named]]) -> None:
    """Make the tensors of one file after the other, in order, and write some of them meanwhile."""
    with ThreadPoolExecutor(WRITERS) as pool:
        writing: deque[Future[None]] = deque()
        for file, shard in files.items():
            while len(writing) >= WRITERS:
                writing.popleft().result()
            tensors = {named.name: named.make().cpu().contiguous() for named in shard}
            writing.append(pool.submit(save_file, tensors, file, metadata={"format": "pt"}))
        for each in writing:
            each.result()


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def chosen_shape(name: str, num_layers: int | None, experts: str | None) -> Shape:
    """The shape ``name`` with other layers or another dtype of its experts; ``ValueError`` for what it cannot have."""
    shape = SHAPES[name]
    if num_layers is not None:
        if num_layers < LEAST_LAYERS:
            raise ValueError(
                f"layers is {num_layers}: use at least {LEAST_LAYERS}, an EAGLE3 head reads three"
            )
        if num_layers % shape.interval:
            raise ValueError(
                f"layers is {num_layers}: use a multiple of {shape.interval} with {name}, of which one is of another "
                "kind"
            )
        if isinstance(shape, Gemma4Shape) and num_layers - shape.without_keys < shape.interval:
            raise ValueError(
                f"layers is {num_layers}: use at least {shape.interval + shape.without_keys} with {name}, whose last "
                f"{shape.without_keys} see keys and values of those before them"
            )
        shape = replace(shape, num_layers=num_layers)
    if experts == "mxfp4" and not isinstance(shape, GptOssShape):
        raise ValueError(f"experts is mxfp4, but {name} has none in that format: use it with gpt-oss-20b")
    if experts is not None and isinstance(shape, GptOssShape):
        shape = replace(shape, quantized=experts == "mxfp4")
    return shape


def chosen_layer(shape: Shape, overlap: float | None, weights: str = "bf16") -> Layer | None:
    """The layers of a mixture whose neighbours choose alike by ``overlap`` (0 if None), or of a shape in FP8.

    None for a dense shape in bfloat16 whose layers all attend.
    """
    fp8 = None if weights == "bf16" else cast(Fp8Format, weights)
    if isinstance(shape, Mixture):
        if fp8 is not None and isinstance(shape, GptOssShape | Gemma4MixtureShape):
            raise ValueError(
                f"weights is {weights}, but experts of {shape.model_type} are not in FP8: leave it out"
            )
        layer = _mixture_layers(shape, overlap or 0.0, stacked=fp8 is None)
    elif overlap is not None:
        raise ValueError("expert-overlap is for mixtures of experts, and this shape is dense: leave it out")
    elif isinstance(shape, HybridShape):
        layer = partial(hybrid_layer, shape)
    elif isinstance(shape, Gemma4Shape):
        layer = partial(gemma4_layer, shape)
    elif fp8 is None:
        return None
    else:
        layer = partial(dense_layer, shape)
    return layer if fp8 is None else Fp8Layers(layer=layer, format=fp8, plain=_plain_modules(shape))


def _mixture_layers(shape: Mixture, overlap: float, *, stacked: bool) -> Layer:
    """``stacked``: experts are published so in bfloat16."""
    common = common_share(shape.num_experts, shape.num_chosen, overlap)
    if isinstance(shape, HybridMixtureShape):
        return HybridMixtureLayers(shape=shape, common=common, stacked=stacked)
    if isinstance(shape, Gemma4MixtureShape):
        return Gemma4MixtureLayers(shape=shape, common=common)
    if isinstance(shape, LatentShape):
        return LatentLayers(shape=shape, common=common)
    if isinstance(shape, Llama4Shape):
        return Llama4Layers(shape=shape, common=common, stacked=stacked)
    return MixtureLayers(shape=shape, common=common)


def _plain_modules(shape: Shape) -> tuple[str, ...]:
    """The linear layers of a target in FP8 that stay in bfloat16."""
    if isinstance(shape, HybridShape):
        return tuple(plain_modules(shape))
    first, end, plain = 0, shape.num_layers if isinstance(shape, Mixture) else 0, ["lm_head"]
    if isinstance(shape, Gemma4Shape) and shape.layer_inputs:
        of_layer = ("per_layer_input_gate", "per_layer_projection")
        plain += [f"model.layers.{index}.{name}" for index in range(shape.num_layers) for name in of_layer]
        return (*plain, "model.per_layer_model_projection")
    if isinstance(shape, LatentShape):
        first, end = shape.num_dense, end + 1
        plain += [
            f"model.layers.{shape.num_layers}.{name}"
            for name in ("eh_proj", "embed_tokens", "shared_head.head")
        ]
    router = "feed_forward.router" if isinstance(shape, Llama4Shape) else "mlp.gate"
    return (*plain, *(f"model.layers.{index}.{router}" for index in range(first, end)))


def chosen_cycle(shape: Shape, accept: float, seed: int) -> Cycle:
    """A text for ``shape``; in a mixture, wrong drafts stay near it, as those of a trained head do in their routing."""
    return Cycle.draw(
        shape.num_plain_tokens, shape.draft_vocab_size, accept, seed, near=isinstance(shape, Mixture)
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path, help="a new or empty directory")
    parser.add_argument("--shape", choices=[*SHAPES], default="llama-3.1-8b")
    parser.add_argument("--layers", type=int, help="of the target, instead of all that the shape has")
    parser.add_argument(
        "--head",
        nargs="+",
        help="eagle3 (default, where the target has no MTP layer), eagle1, peagle, dflash, dspark; eagle3-2: two; "
        "eagle-llama4; assistant, of a Gemma 4; a shape of the same vocabulary for a draft model, as llama-3.2-1b",
    )
    parser.add_argument("--accept", type=float, default=0.75, help="acceptance of the first draft")
    parser.add_argument(
        "--expert-overlap",
        type=float,
        help="how alike neighbouring tokens choose their experts: 0 (default) as by chance, 1 all the same",
    )
    parser.add_argument("--experts", choices=("mxfp4", "bf16"), help="format of a gpt-oss's experts (mxfp4)")
    parser.add_argument(
        "--weights",
        choices=("bf16", *get_args(Fp8Format)),
        default="bf16",
        help="of the target's layers",
    )
    parser.add_argument(
        "--confidence",
        choices=get_args(Confidence),
        default="none",
        help="what a head's probability says of its drafts: nothing (it is nearly 1), as much as a trained head's, or "
        "all; not of eagle1, which has the target's lm_head, of a draft model or an assistant",
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def main() -> None:
    parser, began = _parser(), time.perf_counter()
    arguments = parser.parse_args()
    if arguments.out.exists() and any(arguments.out.iterdir()):
        parser.error(f"{arguments.out} is not empty: name a new directory")
    try:
        shape = chosen_shape(arguments.shape, arguments.layers, arguments.experts)
        layer = chosen_layer(shape, arguments.expert_overlap, arguments.weights)
        usual = [] if isinstance(shape, LatentShape | HybridShape) else ["eagle3"]
        heads = [HeadKind.find(name) for name in arguments.head or usual]
        for head in heads:
            head.config(shape)
        cycle = chosen_cycle(shape, arguments.accept, arguments.seed)
        known = arguments.confidence != "none"
        said = cycle.probabilities(arguments.confidence, arguments.seed) if known else None
    except ValueError as error:
        parser.error(str(error))
    write_pair(arguments.out, shape, cycle, Source(arguments.device, arguments.seed), heads, layer, said)
    size = sum(file.stat().st_size for file in arguments.out.rglob("*.safetensors"))
    alike = f", expert overlap {arguments.expert_overlap or 0:g}" if isinstance(shape, Mixture) else ""
    print(
        f"{arguments.out}: synthetic weights of {arguments.shape}, accept {arguments.accept:g}{alike}; "
        f"{size / 1e9:.2f} GB in {time.perf_counter() - began:.1f} s"
    )


if __name__ == "__main__":
    main()
