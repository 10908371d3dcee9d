"""Writes the measurements of the bundled models: ``training.json`` and a model card each."""

import json
from pathlib import Path

from demo_heads import HEADS

_TARGET = """---
license: apache-2.0
language: en
pipeline_tag: text-generation
---
# The bundled target

A Llama of {million:.1f} M parameters (12 layers, hidden size 256, head_dim 64, 4 query and 2 KV heads, tied
embeddings, byte-level BPE of {vocab} tokens with every digit on its own), made to show and test speculative
decoding. It solves easy word problems, answers short simple questions on everyday topics, and stays readable on
other prompts. It knows almost nothing: do not use it for anything else.

Trained from scratch, in one pass and with fixed seeds, by `scripts/train_demo_pair.py` on
- word problems and chats that the project generates (`scripts/word_problems.py`, `scripts/demo_text/`), Apache-2.0;
- GSM8K *train* (openai/grade-school-math), MIT;
- prompts and pieces of text from Open-Assistant (LAION-AI/Open-Assistant), Apache-2.0, answered by templates.

No test set and no first turn of `data/prompts/` was trained on (general second turns, such as "Explain each step.",
were); whether a generated problem is held out is decided by the hash of its question.

Measured on stored weights (bfloat16, run in float32): {accuracy:.1%} of the held-out generated word problems
end in the exact number; next-token loss on them with their answers {loss:.3f}.
"""

_HEAD = """---
license: apache-2.0
language: en
---
# {title}

{about}

Trained by `scripts/train_demo_pair.py` on what the target itself wrote to training prompts (greedy, and sampled
at temperature 0.7 and 1.0), by training-time test over five unrolled steps with the target's distribution as
soft targets. Data and licences: see the target's card.

Acceptance of four drafts at temperature 0 on prompts that were not trained on, joint by position, measured by
the trainer's own dense implementation: over all rows of the answers ("teacher forced"), and over the rows where
steps start ("simulated").

| prompts | measured | token 0 | token 1 | token 2 | token 3 | mean acceptance length |
| --- | --- | --- | --- | --- | --- | --- |
{rows}
"""
_ABOUT = {
    "drafter": (
        "The bundled EAGLE3 head",
        """One decoder layer for the bundled target in the EAGLE format (`midlayer.*`, `d2t` as offsets, `t2d` as a
mask): hidden size {hidden_size}, {draft_vocab_size} of the target's {vocab_size} tokens. Its features are the
inputs of the target's layers 2, 6 and 9 (the default rule).""",
    ),
    "drafter-eagle1": (
        "The bundled EAGLE-1 head",
        """One small decoder layer for the bundled target in the format of EAGLE-1 and EAGLE-2 (`fc`, `layers.0.*`): it
reads the target's last hidden state, and uses its embedding and output weights.""",
    ),
    "drafter-two-layers": (
        "The bundled EAGLE3 head of two layers",
        """Two small decoder layers for the bundled target in the EAGLE format (`midlayer.*`, `layers.1.*`): hidden size
{hidden_size}, not the target's {target_hidden_size}, so it has its own embedding; {draft_vocab_size} of the
target's {vocab_size} tokens.""",
    ),
}


def _rows(acceptance: dict[str, dict[str, dict]]) -> str:
    lines = []
    for prompts, measured in acceptance.items():
        for how, rates in measured.items():
            cells = [f"{rate:.3f}" for rate in rates["joint"]]
            length = f"{rates['mean_acceptance_length']:.2f}"
            lines.append("| " + " | ".join([prompts, how.replace("_", " "), *cells, length]) + " |")
    return "\n".join(lines)


def write_cards(output: Path, figures: dict) -> None:
    """Write ``figures`` as ``training.json`` and as the README of the target and of each head."""
    (output / "training.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    target_config = json.loads((output / "target/config.json").read_text(encoding="utf-8"))
    target = _TARGET.format(
        million=(output / "target/model.safetensors").stat().st_size / 2e6,
        accuracy=figures["word_problem_accuracy"],
        loss=figures["target_loss_held_out_word_problems"],
        vocab=target_config["vocab_size"],
    )
    (output / "target/README.md").write_text(target, encoding="utf-8")
    for name in HEADS:
        title, about = _ABOUT[name]
        config = json.loads((output / name / "config.json").read_text(encoding="utf-8"))
        card = _HEAD.format(
            title=title, about=about.format(**config), rows=_rows(figures["acceptance"][name])
        )
        (output / name / "README.md").write_text(card, encoding="utf-8")
