"""The sizes of calibrated mixtures of experts, and their config.json files."""

from dataclasses import dataclass, replace
from typing import Any

from calibrated_shapes import TINY, Shape

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


@dataclass(frozen=True, kw_only=True)
class LatentShape(Mixture):
    """GLM-4.7-Flash: latent attention, a layer without experts before the others, an expert for every token, MTP.

    ``num_kv_heads`` and ``head_dim`` are those of the embedding's code alone (calibrated_codes.py).
    """

    moe_size: int
    query_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    num_dense: int = 1
    scale: float = 1.8

    @property
    def expert_size(self) -> int:
        return self.moe_size

    @property
    def model_type(self) -> str:
        return "glm4_moe_lite"

    def target_config(self) -> dict[str, Any]:
        plain = {name: value for name, value in self.plain_config.items() if name != "head_dim"}
        return plain | {
            "num_key_value_heads": self.num_heads,
            "moe_intermediate_size": self.moe_size,
            "n_routed_experts": self.num_experts,
            "n_shared_experts": 1,
            "num_experts_per_tok": self.num_chosen,
            "n_group": 1,
            "topk_group": 1,
            "topk_method": "noaux_tc",
            "norm_topk_prob": True,
            "routed_scaling_factor": self.scale,
            "first_k_dense_replace": self.num_dense,
            "mlp_layer_types": ["dense"] * self.num_dense + ["sparse"] * (self.num_layers - self.num_dense),
            "num_nextn_predict_layers": 1,
            "q_lora_rank": self.query_rank,
            "kv_lora_rank": self.kv_rank,
            "qk_nope_head_dim": self.nope_dim,
            "qk_rope_head_dim": self.rope_dim,
            "v_head_dim": self.value_dim,
        }


def _yarn(original: int) -> dict[str, Any]:
    return {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": original,
        "truncate": False,
    }


_GPT_OSS_20B = GptOssShape(
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
)
_QWEN3_30B = Qwen3MoeShape(
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
)
_GLM_FLASH = LatentShape(
    architecture="Glm4MoeLiteForCausalLM",
    vocab_size=154_880,
    hidden_size=2048,
    intermediate_size=10_240,
    num_layers=47,
    num_heads=20,
    num_kv_heads=4,
    head_dim=128,
    max_positions=202_752,
    draft_vocab_size=32_000,
    bos_token_id=154_821,
    eos_token_ids=(154_820, 154_827, 154_829),
    num_plain_tokens=154_820,
    rope_theta=1_000_000.0,
    rms_norm_eps=1e-5,
    num_experts=64,
    num_chosen=4,
    moe_size=1536,
    query_rank=768,
    kv_rank=512,
    nope_dim=192,
    rope_dim=64,
    value_dim=256,
    passage_size=64,
)
MIXTURES: dict[str, Mixture] = {
    "gpt-oss-20b": _GPT_OSS_20B,
    "qwen3-30b-a3b": _QWEN3_30B,
    "glm-4.7-flash": _GLM_FLASH,
    "tiny-gpt-oss": replace(
        _GPT_OSS_20B,
        **TINY,
        hidden_size=320,
        intermediate_size=64,
        rope_scaling=_yarn(128),
        num_experts=16,
        sliding_window=16,
        passage_size=32,
    ),
    "tiny-qwen3-moe": replace(
        _QWEN3_30B,
        **TINY,
        hidden_size=320,
        intermediate_size=512,
        num_experts=32,
        num_chosen=4,
        moe_size=64,
        passage_size=32,
    ),
    "tiny-glm": replace(
        _GLM_FLASH,
        **TINY,
        hidden_size=320,
        intermediate_size=512,
        num_experts=32,
        moe_size=64,
        query_rank=96,
        kv_rank=64,
        nope_dim=48,
        rope_dim=16,
        value_dim=64,
        passage_size=32,
    ),
}
