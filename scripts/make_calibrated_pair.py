"""Writes a full-size target and draft heads with synthetic weights, whose text and acceptance are known in advance.

    python scripts/make_calibrated_pair.py OUT --shape llama-3.1-8b --accept 0.75
    python scripts/make_calibrated_pair.py OUT --head eagle3 eagle1 eagle3-2 peagle-2

``OUT/target`` and ``OUT/drafter`` are checkpoints in the public formats, ``OUT/cycle.json`` is the text they generate
(see calibrated_weights.py, calibrated_heads.py, calibrated_peagle.py and calibrated_cycle.py). They are for measuring
speed, not quality. Several heads for one target are in directories of their names: ``OUT/eagle3``, ``OUT/eagle1``.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from calibrated_codes import Codes
from calibrated_cycle import Cycle
from calibrated_heads import eagle1_tensors, eagle3_tensors
from calibrated_peagle import peagle_tensors
from calibrated_shapes import SHAPES, Shape
from calibrated_weights import DTYPE, Named, Source, target_tensors
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

SHARD_BYTES = 5 * 10**9
CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"


@dataclass(frozen=True, kw_only=True)
class HeadKind:
    """A draft head to write: its name, ``config.json`` and tensors."""

    name: str
    config: Callable[[Shape], dict[str, Any]]
    tensors: Callable[[Shape, Codes, Cycle, Source], Iterator[Named]]

    @classmethod
    def find(cls, name: str) -> "HeadKind":
        """``eagle3``, ``eagle3-2`` (layers), ``eagle1``, ``peagle-2``; ``ValueError`` for another name."""
        kind, dash, suffix = name.partition("-")
        layers = int(suffix) if suffix.isdecimal() else 0 if dash else 1
        if layers and kind == "eagle3":
            tensors = partial(eagle3_tensors, layers)
            return cls(name=name, config=lambda shape: shape.eagle3_config(layers), tensors=tensors)
        if layers and kind == "peagle":
            tensors = partial(peagle_tensors, layers)
            return cls(name=name, config=lambda shape: shape.peagle_config(layers), tensors=tensors)
        if name == "eagle1":
            return cls(name=name, config=Shape.eagle1_config, tensors=eagle1_tensors)
        raise ValueError(
            f"no head {name!r}: use eagle3, eagle1 or peagle; eagle3-2 or peagle-2 for two layers"
        )


def write_pair(
    out: Path,
    shape: Shape,
    cycle: Cycle,
    source: Source,
    heads: Sequence[HeadKind] = (HeadKind.find("eagle3"),),
) -> None:
    """Write all checkpoints and the cycle below ``out``; at most a shard and three tables are in memory."""
    folder = out / "target"
    folder.mkdir(parents=True, exist_ok=True)
    cycle.write(out)
    codes = Codes.draw(shape, cycle, source)
    write_tensors(folder, list(target_tensors(shape, codes.embedding, cycle, source)), SHARD_BYTES)
    _write_json(folder / "config.json", shape.target_config())
    _write_json(folder / "generation_config.json", shape.generation_config())
    write_tokenizer(folder, shape, cycle)
    for head in heads:
        folder = out / ("drafter" if len(heads) == 1 else head.name)
        folder.mkdir(exist_ok=True)
        write_tensors(folder, list(head.tensors(shape, codes, cycle, source)), SHARD_BYTES)
        _write_json(folder / "config.json", head.config(shape))


def write_tensors(folder: Path, tensors: list[Named], shard_bytes: int) -> None:
    """Safetensors files of at most ``shard_bytes`` (or one tensor) each, with an index if there are several."""
    shards = list(_shards(tensors, shard_bytes))
    if len(shards) == 1:
        _save(folder / "model.safetensors", shards[0])
        return
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        _save(folder / file, shard)
        weight_map |= {named.name: file for named in shard}
    total = sum(_num_bytes(named) for named in tensors)
    _write_json(
        folder / "model.safetensors.index.json",
        {"metadata": {"total_size": total}, "weight_map": weight_map},
    )


def write_tokenizer(folder: Path, shape: Shape, cycle: Cycle) -> None:
    """A word for each id, ``w17`` for 17; any other word is the text's first token, so any prompt works."""
    vocabulary = {f"w{token}": token for token in range(shape.vocab_size)}
    unknown = f"w{cycle.tokens[0]}"
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": f"w{shape.bos_token_id}",
            "eos_token": f"w{shape.eos_token_ids[0]}",
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
    """In the checkpoint's dtype; the head's d2t and t2d, which have others, are negligible."""
    return torch.Size(named.shape).numel() * DTYPE.itemsize


def _save(file: Path, shard: list[Named]) -> None:
    save_file(
        {named.name: named.make().cpu().contiguous() for named in shard}, file, metadata={"format": "pt"}
    )


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="a new or empty directory")
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument(
        "--head", nargs="+", default=["eagle3"], help="eagle3, eagle1, peagle; eagle3-2: two layers"
    )
    parser.add_argument("--accept", type=float, default=0.75, help="acceptance of the first draft")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.out.exists() and any(arguments.out.iterdir()):
        parser.error(f"{arguments.out} is not empty: name a new directory")
    shape, began = SHAPES[arguments.shape], time.perf_counter()
    try:
        heads = [HeadKind.find(name) for name in arguments.head]
        cycle = Cycle.draw(shape.num_plain_tokens, shape.draft_vocab_size, arguments.accept, arguments.seed)
    except ValueError as error:
        parser.error(str(error))
    write_pair(arguments.out, shape, cycle, Source(arguments.device, arguments.seed), heads)
    size = sum(file.stat().st_size for file in arguments.out.rglob("*.safetensors"))
    print(
        f"{arguments.out}: synthetic weights of {arguments.shape}, accept {arguments.accept:g}; "
        f"{size / 1e9:.2f} GB in {time.perf_counter() - began:.1f} s"
    )


if __name__ == "__main__":
    main()
