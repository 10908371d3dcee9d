"""The model sizes of calibrated pairs, and their config.json files."""

from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A target's sizes and its head's vocabulary size; the layers of heads have the target's sizes."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    draft_vocab_size: int
    bos_token_id: int
    eos_token_ids: tuple[int, ...]
    num_plain_tokens: int  # ids below are plain tokens, the others are special and never in the text
    rope_theta: float
    rms_norm_eps: float
    rope_scaling: dict[str, Any] | None = None
    qk_norm: bool = False
    passage_size: int = 0  # tokens of the text whose embeddings have a part in common; 0: no such part
    head_hidden_size: int = 0  # of the EAGLE3 head's stream, where that is not the target's

    @property
    def model_type(self) -> str:
        """The target's ``model_type`` in ``transformers``."""
        return "qwen3" if self.qk_norm else "llama"

    @property
    def q_size(self) -> int:
        """Total width of the query heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Total width of the key heads, or of the value heads."""
        return self.num_kv_heads * self.head_dim

    @property
    def of_head(self) -> "Shape":
        """The sizes of an EAGLE3 head's layers: the target's, or as many heads as fill a narrower stream."""
        width = self.head_hidden_size
        if not width:
            return self
        return replace(
            self, hidden_size=width, intermediate_size=8 * width // 3, num_heads=width // self.head_dim
        )

    @property
    def mask_token_id(self) -> int:
        """The token in the place of those that a parallel head does not know yet: a special one, not in any text."""
        return self.vocab_size - 1

    @property
    def mark(self) -> float:
        """The first number of the embedding of every token but the mask token."""
        return self.head_dim**0.5 / 2

    def target_config(self) -> dict[str, Any]:
        """The target's ``config.json``."""
        scaling = {"rope_scaling": self.rope_scaling} if self.rope_scaling else {}
        return (
            self._config()
            | scaling
            | {
                "architectures": [self.architecture],
                "model_type": self.model_type,
                "num_hidden_layers": self.num_layers,
            }
        )

    def eagle3_config(self, num_layers: int) -> dict[str, Any]:
        """The ``config.json`` of an EAGLE3 head, in the format of EAGLE's own checkpoints."""
        own = {"target_hidden_size": self.hidden_size} if self.head_hidden_size else {}
        return (
            self.of_head._config()
            | own
            | {
                "architectures": ["LlamaForCausalLMEagle3"],
                "model_type": "llama",
                "num_hidden_layers": num_layers,
                "draft_vocab_size": self.draft_vocab_size,
            }
        )

    def peagle_config(self, num_layers: int) -> dict[str, Any]:
        """The ``config.json`` of a P-EAGLE head, in vLLM's format."""
        return self.eagle3_config(num_layers) | {
            "parallel_drafting": True,
            "mask_token_id": self.mask_token_id,
        }

    def eagle1_config(self) -> dict[str, Any]:
        """The ``config.json`` of an EAGLE-1 head: a Llama's of one layer, which does not say what it is."""
        return self._config() | {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "num_hidden_layers": 1,
            "bias": False,
        }

    def generation_config(self) -> dict[str, Any]:
        """The target's ``generation_config.json``."""
        return {
            "bos_token_id": self.bos_token_id,
            "eos_token_id": list(self.eos_token_ids),
            "do_sample": False,
        }

    def _config(self) -> dict[str, Any]:
        return {
            "synthetic_weights": True,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": list(self.eos_token_ids),
            "torch_dtype": "bfloat16",
            "transformers_version": "4.57.1",  # with these keys; without it the tokenizer is taken for Mistral's
        }


def _llama3_scaling(original: int) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": original,
    }


_LLAMA_8B = Shape(
    architecture="LlamaForCausalLM",
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_positions=131_072,
    draft_vocab_size=32_000,
    bos_token_id=128_000,
    eos_token_ids=(128_001, 128_008, 128_009),
    num_plain_tokens=128_000,
    rope_theta=500_000.0,
    rms_norm_eps=1e-5,
    rope_scaling=_llama3_scaling(8192),
)
TINY: dict[str, Any] = {  # of every small model for tests on a CPU
    "vocab_size": 1536,
    "num_layers": 8,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 64,
    "max_positions": 4096,
    "draft_vocab_size": 1024,
    "bos_token_id": 1500,
    "eos_token_ids": (1501, 1508),
    "num_plain_tokens": 1500,
}
SHAPES = {
    "llama-3.1-8b": _LLAMA_8B,
    "llama-3.3-70b": replace(
        _LLAMA_8B,
        hidden_size=8192,
        intermediate_size=28_672,
        num_layers=80,
        num_heads=64,
        head_hidden_size=6144,  # as yuhuili/EAGLE3-LLaMA3.3-Instruct-70B
    ),
    "qwen3-8b": Shape(
        architecture="Qwen3ForCausalLM",
        vocab_size=151_936,
        hidden_size=4096,
        intermediate_size=12_288,
        num_layers=36,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        max_positions=40_960,
        draft_vocab_size=32_000,
        bos_token_id=151_643,
        eos_token_ids=(151_645, 151_643),
        num_plain_tokens=151_643,
        rope_theta=1_000_000.0,
        rms_norm_eps=1e-6,
        qk_norm=True,
    ),
    "tiny": replace(
        _LLAMA_8B, **TINY, hidden_size=256, intermediate_size=512, rope_scaling=_llama3_scaling(512)
    ),
}
