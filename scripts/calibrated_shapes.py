"""The model sizes of calibrated pairs, read from calibrated_shapes.toml, and their config.json files."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A target's sizes and its head's vocabulary size; the layers of heads have the target's sizes."""

    architecture: str
    model_type: str  # in ``transformers``
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
    interval: int = 1  # layers after which their kinds come again

    @property
    def q_size(self) -> int:
        """Total width of the query heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Total width of the key heads, or of the value heads."""
        return self.num_kv_heads * self.head_dim

    @property
    def own_bounds(self) -> tuple[int, int, int]:
        """The numbers of an embedding that its token has for itself: those of unknown tokens, and of the others."""
        end = self.hidden_size - (self.head_dim if self.passage_size else 0)
        return self.kv_size, self.kv_size + self.leap_size, end

    @property
    def leap_size(self) -> int:
        """Numbers of an embedding that are of unknown tokens alone (calibrated_codes.py); 0: there are none."""
        return 0

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
    def embedding_scale(self) -> float:
        """What the model multiplies its embedding by."""
        return 1.0

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

    def block_config(self, num_layers: int, dspark: bool) -> dict[str, Any]:
        """The ``config.json`` of a DFlash head in z-lab's format, or of a DSpark head in DeepSpec's."""
        most = 2**num_layers if dspark else 2 ** (num_layers - 1)
        every = range(1, self.num_layers - 1)
        return self._config() | {
            "architectures": ["Qwen3DSparkModel" if dspark else "DFlashDraftModel"],
            "model_type": "qwen3",
            "num_hidden_layers": num_layers,
            "attention_bias": True,
            "draft_vocab_size": self.draft_vocab_size,
            "block_size": min(most, 16) if dspark else min(most + 1, 16),
            "mask_token_id": self.mask_token_id,
            "target_layer_ids": [every[index * (len(every) - 1) // 4] for index in range(5)],
            **({"markov_rank": 256, "markov_head_type": "vanilla"} if dspark else {}),
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


ATTENTION_BLOCK = ("sliding_attention", "full_attention")  # GPT-OSS: every second layer sees a window


@dataclass(frozen=True, kw_only=True)
class Mixture(Shape):
    """A target whose feed-forward blocks are experts; ``intermediate_size`` is that of its heads' block."""

    num_experts: int
    num_chosen: int  # experts of each row
    moe_size: int = 0  # inner width of one expert where that is not ``intermediate_size``

    @property
    def expert_size(self) -> int:
        """Inner width of one expert."""
        return self.moe_size or self.intermediate_size


@dataclass(frozen=True, kw_only=True)
class Qwen3MoeShape(Mixture):
    """Qwen3-MoE: softmax over all experts, whose tensors are stored one by one."""

    def target_config(self) -> dict[str, Any]:
        return super().target_config() | {
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

    def target_config(self) -> dict[str, Any]:
        """Published configs count the chosen experts under two names."""
        layer_types = [ATTENTION_BLOCK[index % 2] for index in range(self.num_layers)]
        plain = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
        quantization = {"quant_method": "mxfp4", "modules_to_not_convert": plain}
        return (
            super().target_config()
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

    query_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    num_dense: int = 1
    scale: float = 1.8

    def target_config(self) -> dict[str, Any]:
        plain = {name: value for name, value in super().target_config().items() if name != "head_dim"}
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


@dataclass(frozen=True, kw_only=True)
class HybridShape(Shape):
    """Qwen3.5 and 3.6: Gated DeltaNet in all layers but every fourth, which attends and has an output gate; MTP."""

    linear_key_heads: int
    linear_value_heads: int
    linear_head_dim: int  # of keys and of values
    num_taps: int = 4  # of the convolution
    rotary_share: float = 0.25  # of a head
    interval: int = 4  # the last of which attends

    @property
    def leap_size(self) -> int:
        return self.kv_size

    def is_attending(self, layer: int) -> bool:
        """Whether ``layer`` has keys and values in place of a state."""
        return (layer + 1) % self.interval == 0

    def target_config(self) -> dict[str, Any]:
        pairs = int(self.head_dim * self.rotary_share) // 2
        others = {"rope_theta", "mlp_bias", "torch_dtype"}
        plain = {name: value for name, value in super().target_config().items() if name not in others}
        kinds = ("linear_attention", "full_attention")
        return plain | {
            "dtype": "bfloat16",
            "layer_types": [kinds[self.is_attending(layer)] for layer in range(self.num_layers)],
            "full_attention_interval": self.interval,
            "attn_output_gate": True,
            "linear_num_key_heads": self.linear_key_heads,
            "linear_num_value_heads": self.linear_value_heads,
            "linear_key_head_dim": self.linear_head_dim,
            "linear_value_head_dim": self.linear_head_dim,
            "linear_conv_kernel_dim": self.num_taps,
            "mamba_ssm_dtype": "float32",
            "mtp_num_hidden_layers": 1,
            "mtp_use_dedicated_embeddings": False,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": self.rope_theta,
                "partial_rotary_factor": self.rotary_share,
                "mrope_section": [(pairs + 2) // 3, (pairs + 1) // 3, pairs // 3],
                "mrope_interleaved": True,
            },
        }


@dataclass(frozen=True, kw_only=True)
class HybridMixtureShape(HybridShape, Mixture):
    """The same with experts in all layers, beside a gated one of their size that all tokens go through."""

    def target_config(self) -> dict[str, Any]:
        plain = {
            name: value for name, value in super().target_config().items() if name != "intermediate_size"
        }
        return plain | {
            "num_experts": self.num_experts,
            "num_experts_per_tok": self.num_chosen,
            "moe_intermediate_size": self.moe_size,
            "shared_expert_intermediate_size": self.moe_size,
        }


@dataclass(frozen=True, kw_only=True)
class Llama4Shape(Mixture):
    """Llama-4 Scout: attention in chunks but for every fourth layer, an expert a token beside one for all tokens."""

    chunk_size: int
    interval: int = 4  # the last of which has no positions

    def target_config(self) -> dict[str, Any]:
        return super().target_config() | self._layers() | {"moe_layers": list(range(self.num_layers))}

    def eagle_llama4_config(self) -> dict[str, Any]:
        """The ``config.json`` of an EAGLE head in the format of Llama-4's."""
        own = {"moe_layers": [], "no_rope_layers": [1], "num_hidden_layers": 1, "use_qk_norm": False}
        named = {"architectures": [self.architecture], "model_type": self.model_type}
        return self._config() | self._layers() | named | own

    def _layers(self) -> dict[str, Any]:
        return {
            "intermediate_size": self.moe_size,
            "intermediate_size_mlp": self.intermediate_size,
            "num_local_experts": self.num_experts,
            "num_experts_per_tok": self.num_chosen,
            "interleave_moe_layer_step": 1,
            "no_rope_layers": [int((layer + 1) % self.interval != 0) for layer in range(self.num_layers)],
            "use_qk_norm": True,
            "attention_chunk_size": self.chunk_size,
            "attn_temperature_tuning": True,
            "floor_scale": self.chunk_size,
            "attn_scale": 0.1,
        }


@dataclass(frozen=True, kw_only=True)
class Gemma4Shape(Shape):
    """Gemma 4: windows, but in every sixth layer wider heads, whose keys are values too.

    In some sizes keys are not values, each layer has an input of its own, and the last layers no keys and values.

    ``num_kv_heads`` and ``head_dim`` are those of layers with a window, and of heads, which ``rope_theta`` is of too.
    """

    qk_norm: bool = True
    interval: int = 6  # the last of which has no window
    global_kv_heads: int
    global_head_dim: int
    sliding_window: int
    assistant_size: int  # width of its stream
    assistant_inner: int  # and of its MLPs
    assistant_heads: int | None = None  # None: as many as the target's
    num_centroids: int = 0  # of its groups of tokens, of which 32 have logits; 0: all have
    keys_are_values: bool = True
    layer_inputs: int = 0  # width of each layer's own input
    without_keys: int = 0  # last layers, which see the keys and values of earlier ones
    double_wide: bool = False  # the MLPs of these

    @property
    def embedding_scale(self) -> float:
        return self.hidden_size**0.5

    @property
    def of_assistant(self) -> "Gemma4Shape":
        """The sizes of an assistant."""
        sizes = {"hidden_size": self.assistant_size, "intermediate_size": self.assistant_inner}
        sizes |= {"num_heads": self.assistant_heads or self.num_heads, "num_layers": 4, "interval": 4}
        return replace(self, **sizes, layer_inputs=0, without_keys=4, double_wide=False)

    def sees_all(self, layer: int) -> bool:
        """Whether ``layer`` has no window."""
        return (layer + 1) % self.interval == 0

    def stores(self, layer: int) -> bool:
        """Whether ``layer`` has keys and values of its own."""
        return layer < self.num_layers - self.without_keys

    def of_layer(self, layer: int) -> "Gemma4Shape":
        """With the heads of keys of ``layer``, their width, and the width of its MLP."""
        inner = self.intermediate_size * (2 if self.double_wide and not self.stores(layer) else 1)
        own = replace(self, intermediate_size=inner)
        if not self.sees_all(layer):
            return own
        return replace(own, num_kv_heads=self.global_kv_heads, head_dim=self.global_head_dim)

    def target_config(self) -> dict[str, Any]:
        others = {"rope_theta", "hidden_act", "mlp_bias", "torch_dtype"}
        plain = {name: value for name, value in super().target_config().items() if name not in others}
        ropes = (
            {"rope_type": "default", "rope_theta": 10_000.0},
            {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": self.rope_theta},
        )
        return plain | {
            "dtype": "bfloat16",
            "hidden_activation": "gelu_pytorch_tanh",
            "layer_types": [ATTENTION_BLOCK[self.sees_all(layer)] for layer in range(self.num_layers)],
            "rope_parameters": dict(zip(ATTENTION_BLOCK, ropes, strict=True)),
            "sliding_window": self.sliding_window,
            "global_head_dim": self.global_head_dim,
            "num_global_key_value_heads": self.global_kv_heads,
            "attention_k_eq_v": self.keys_are_values,
            "num_kv_shared_layers": self.without_keys,
            "use_double_wide_mlp": self.double_wide,
            "hidden_size_per_layer_input": self.layer_inputs,
            "vocab_size_per_layer_input": self.vocab_size,
            "final_logit_softcapping": 30.0,
            "pad_token_id": 0,
        }

    def assistant_config(self) -> dict[str, Any]:
        """The ``config.json`` of an assistant in Google's format."""
        own = self.of_assistant
        text = {"tie_word_embeddings": True, "final_logit_softcapping": None, "vocab_size_per_layer_input": 0}
        return {
            "synthetic_weights": True,
            "architectures": ["Gemma4AssistantForCausalLM"],
            "model_type": "gemma4_assistant",
            "dtype": "bfloat16",
            "backbone_hidden_size": self.hidden_size,
            "use_ordered_embeddings": self.num_centroids > 0,
            "num_centroids": self.num_centroids or 2048,
            "centroid_intermediate_top_k": 32,
            "tie_word_embeddings": True,
            "text_config": Gemma4Shape.target_config(own) | text,
        }


@dataclass(frozen=True, kw_only=True)
class Gemma4MixtureShape(Gemma4Shape, Mixture):
    """The same with experts beside the MLP, which is ``intermediate_size`` wide."""

    def target_config(self) -> dict[str, Any]:
        return super().target_config() | {
            "enable_moe_block": True,
            "num_experts": self.num_experts,
            "top_k_experts": self.num_chosen,
            "moe_intermediate_size": self.moe_size,
        }


_CLASSES: Mapping[str, type[Shape]] = {  # by architecture; of all others Shape
    "GptOssForCausalLM": GptOssShape,
    "Qwen3MoeForCausalLM": Qwen3MoeShape,
    "Glm4MoeLiteForCausalLM": LatentShape,
    "Qwen3_5ForCausalLM": HybridShape,
    "Qwen3_5MoeForCausalLM": HybridMixtureShape,
    "Llama4ForCausalLM": Llama4Shape,
    "Gemma4ForCausalLM": Gemma4Shape,
}
_TABLE: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))


def _sizes(name: str) -> dict[str, Any]:
    """The entries of the table ``name`` and of those that it is like, of which it overrides what it has."""
    found: dict[str, Any] = {}
    for part in (*map(_sizes, _TABLE[name].get("like", ())), _TABLE[name]):
        scaling = {"rope_scaling": {**found.get("rope_scaling", {}), **part.get("rope_scaling", {})}}
        found |= part | {key: value for key, value in scaling.items() if value}
    found.pop("like", None)
    return found


def _shape(name: str) -> Shape:
    sizes = _sizes(name)
    kind = _CLASSES.get(sizes["architecture"], Shape)
    if kind is Gemma4Shape and "num_experts" in sizes:
        kind = Gemma4MixtureShape
    return kind(**sizes | {"eos_token_ids": tuple(sizes["eos_token_ids"])})


SHAPES = {name: _shape(name) for name in _TABLE if name != "small"}
MIXTURES = {name: shape for name, shape in SHAPES.items() if isinstance(shape, Mixture)}
