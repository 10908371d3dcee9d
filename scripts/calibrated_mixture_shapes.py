"""The sizes of calibrated mixtures of experts, and their config.json files."""

from dataclasses import dataclass
from typing import Any

from calibrated_shapes import Shape

ATTENTION_BLOCK = ("sliding_attention", "full_attention")  # GPT-OSS: every second layer sees a window


@dataclass(frozen=True, kw_only=True)
class Mixture(Shape):
    """A target whose feed-forward blocks are experts; ``intermediate_size`` is that of its heads' block."""

    num_experts: int
    num_chosen: int  # experts of each row

    @property
    def expert_size(self) -> int:
        """Inner width of one expert."""
        return self.intermediate_size

    @property
    def plain_config(self) -> dict[str, Any]:
        """What the config has of any target."""
        return super().target_config()


@dataclass(frozen=True, kw_only=True)
class Qwen3MoeShape(Mixture):
    """Qwen3-MoE: softmax over all experts, whose tensors are stored one by one."""

    moe_size: int

    @property
    def expert_size(self) -> int:
        return self.moe_size

    @property
    def model_type(self) -> str:
        return "qwen3_moe"

    def target_config(self) -> dict[str, Any]:
        return self.plain_config | {
            "num_experts": self.num_experts,
            "num_experts_per_tok": self.num_chosen,
            "moe_intermediate_size": self.moe_size,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "sliding_window": None,
            "use_sliding_window": False,
        }


@dataclass(frozen=True, kw_only=True)
class GptOssShape(Mixture):
    """GPT-OSS: biases, sinks, a window on every second layer; all experts of a layer in one tensor."""

    sliding_window: int
    quantized: bool = True  # experts in MXFP4, otherwise bf16

    @property
    def model_type(self) -> str:
        return "gpt_oss"

    def target_config(self) -> dict[str, Any]:
        """Published configs count the chosen experts under two names."""
        layer_types = [ATTENTION_BLOCK[index % 2] for index in range(self.num_layers)]
        plain = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
        quantization = {"quant_method": "mxfp4", "modules_to_not_convert": plain}
        return (
            self.plain_config
            | {
                "num_local_experts": self.num_experts,
                "num_experts_per_tok": self.num_chosen,
                "experts_per_token": self.num_chosen,
                "attention_bias": True,
                "sliding_window": self.sliding_window,
                "layer_types": layer_types,
                "swiglu_limit": 7.0,
                "initial_context_length": 4096,
            }
            | ({"quantization_config": quantization} if self.quantized else {})
        )


def _yarn(original: int) -> dict[str, Any]:
    return {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": original,
        "truncate": False,
    }


MIXTURES: dict[str, Mixture] = {
    "gpt-oss-20b": GptOssShape(
        architecture="GptOssForCausalLM",
        vocab_size=201_088,
        hidden_size=2880,
        intermediate_size=2880,
        num_layers=24,
        num_heads=64,
        num_kv_heads=8,
        head_dim=64,
        max_positions=131_072,
        draft_vocab_size=32_000,
        bos_token_id=199_998,
        eos_token_ids=(200_002, 199_999, 200_012),
        num_plain_tokens=199_998,
        rope_theta=150_000.0,
        rms_norm_eps=1e-5,
        rope_scaling=_yarn(4096),
        num_experts=32,
        num_chosen=4,
        sliding_window=128,
        passage_size=64,
    ),
    "qwen3-30b-a3b": Qwen3MoeShape(
        architecture="Qwen3MoeForCausalLM",
        vocab_size=151_936,
        hidden_size=2048,
        intermediate_size=6144,
        num_layers=48,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        max_positions=40_960,
        draft_vocab_size=32_000,
        bos_token_id=151_643,
        eos_token_ids=(151_645, 151_643),
        num_plain_tokens=151_643,
        rope_theta=1_000_000.0,
        rms_norm_eps=1e-6,
        qk_norm=True,
        num_experts=128,
        num_chosen=8,
        moe_size=768,
        passage_size=64,
    ),
    "tiny-gpt-oss": GptOssShape(  # for tests on a CPU
        architecture="GptOssForCausalLM",
        vocab_size=1536,
        hidden_size=320,
        intermediate_size=64,
        num_layers=8,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        max_positions=4096,
        draft_vocab_size=1024,
        bos_token_id=1500,
        eos_token_ids=(1501, 1508),
        num_plain_tokens=1500,
        rope_theta=150_000.0,
        rms_norm_eps=1e-5,
        rope_scaling=_yarn(128),
        num_experts=16,
        num_chosen=4,
        sliding_window=16,
        passage_size=32,
    ),
    "tiny-qwen3-moe": Qwen3MoeShape(
        architecture="Qwen3MoeForCausalLM",
        vocab_size=1536,
        hidden_size=320,
        intermediate_size=512,
        num_layers=8,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        max_positions=4096,
        draft_vocab_size=1024,
        bos_token_id=1500,
        eos_token_ids=(1501, 1508),
        num_plain_tokens=1500,
        rope_theta=1_000_000.0,
        rms_norm_eps=1e-6,
        qk_norm=True,
        num_experts=32,
        num_chosen=4,
        moe_size=64,
        passage_size=32,
    ),
}
