"""Writes a full-size target and EAGLE3 head with synthetic weights, whose text and acceptance are known in advance.

    python scripts/make_calibrated_pair.py OUT --shape llama-3.1-8b --accept 0.75

``OUT/target`` and ``OUT/drafter`` are checkpoints in the public formats, ``OUT/cycle.json`` is the text they generate
(see calibrated_weights.py and calibrated_cycle.py). They are for measuring speed, not quality.
"""

import argparse
import json
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from calibrated_cycle import Cycle
from calibrated_shapes import SHAPES, Shape
from calibrated_weights import DTYPE, Named, Source, head_tensors, target_tensors
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

SHARD_BYTES = 5 * 10**9
CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"


def write_pair(out: Path, shape: Shape, cycle: Cycle, source: Source) -> None:
    """Write both checkpoints and the cycle below ``out``; at most a shard and two tables are in memory."""
    for part in ("target", "drafter"):
        (out / part).mkdir(parents=True, exist_ok=True)
    cycle.write(out)
    embedding = source.codes(shape.vocab_size, shape.hidden_size, shape.head_dim)
    write_tensors(out / "target", list(target_tensors(shape, embedding, cycle, source)), SHARD_BYTES)
    write_tensors(out / "drafter", list(head_tensors(shape, embedding, cycle, source)), SHARD_BYTES)
    _write_json(out / "target" / "config.json", shape.target_config())
    _write_json(out / "target" / "generation_config.json", shape.generation_config())
    _write_json(out / "drafter" / "config.json", shape.head_config())
    write_tokenizer(out / "target", shape, cycle)


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
    parser.add_argument("--accept", type=float, default=0.75, help="acceptance of the first draft")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.out.exists() and any(arguments.out.iterdir()):
        parser.error(f"{arguments.out} is not empty: name a new directory")
    shape, began = SHAPES[arguments.shape], time.perf_counter()
    try:
        cycle = Cycle.draw(shape.num_plain_tokens, shape.draft_vocab_size, arguments.accept, arguments.seed)
    except ValueError as error:
        parser.error(str(error))
    write_pair(arguments.out, shape, cycle, Source(arguments.device, arguments.seed))
    size = sum(file.stat().st_size for file in arguments.out.rglob("*.safetensors"))
    print(
        f"{arguments.out}: synthetic weights of {arguments.shape}, accept {arguments.accept:g}; "
        f"{size / 1e9:.2f} GB in {time.perf_counter() - began:.1f} s"
    )


if __name__ == "__main__":
    main()
