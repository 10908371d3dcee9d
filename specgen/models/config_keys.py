"""What is done with each key of a model's configs: read, held to some values, or without effect and why; no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from specgen.config import require, shown
from specgen.models.config_fields import Raw, section, text_part
from specgen.models.rotary import unread_parameters


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_LONGEST, _MOST = 40, 12  # characters of a key, and keys, that are printed
_OF_A_LAYER = "layers that do so are of other families, use a checkpoint of a supported one"
_HALVES = "rotated numbers of a head are its halves: reorder the rows of q and k"
_OFF = (None, False, 0)
Only = Mapping[str, tuple[tuple[object, ...], str]]


def _held(names: str, values: tuple[object, ...], why: str = _OF_A_LAYER) -> Only:
    return dict.fromkeys(names.split(), (values, why))


# Values that are supported, and why no other is. What other families compute with is held to having no effect.
_ONLY: Only = {
    **_held("hidden_act", ("silu",)),
    **_held("hidden_activation", ("silu", None)),
    **_held("is_causal", (True,), "text is generated from left to right: use a causal model"),
    **_held("is_encoder_decoder", (False, None), "use a model that is a decoder alone"),
    **_held("attention_chunk_size kv_sharing_modes", (None,)),
    **_held("is_neox_style rope_is_neox_style", (True, None), _HALVES),
    **_held("rope_interleaved", (False, None), _HALVES),
    **_held(
        "per_layer_config", (None, {}), "layers of one model have one shape here: use another checkpoint"
    ),
    **_held("fusion_config", (None, {}), "remove it, or save the weights as it fuses them"),
    **_held(
        "transformers_weights", (None,), "weights are those of model.safetensors or its index: remove it"
    ),
    **_held("attn_logit_softcapping final_logit_softcapping clip_qkv query_pre_attn_scalar alibi", _OFF),
    **_held("attn_temperature_tuning no_rope_layers use_bidirectional_attention index_topk", (*_OFF, [])),
    **_held("attention_multiplier residual_multiplier embedding_multiplier logits_scaling", (None, 1)),
    **_held("logit_scale", (None, 1)),
}
_OF_ROUTERS: Only = {
    **_held("scoring_func", ("sigmoid", None)),
    **_held("topk_method", ("noaux_tc", None)),
    **_held("moe_layer_freq", (1, None)),
}
_OF_HYBRIDS: Only = {
    **_held("attn_output_gate", (True, None)),
    **_held("output_gate_type", ("swish", "silu", None)),
    **_held("mamba_ssm_dtype", ("float32", None), "states are kept in it: remove the key to run it so"),
    **_held(
        "mtp_use_dedicated_embeddings",
        (False, None),
        "MTP layers with an embedding of their own are not built",
    ),
}
# Why no logit depends on them, and the keys of that kind
_NO_EFFECT: Mapping[str, str] = {
    "where it comes from": "_name_or_path name_or_path _commit_hash transformers_version model_type auto_map "
    "synthetic_weights unsloth_fixed unsloth_version for_llm_compressor is_llama_config "
    "transformers.js_config",  # code of a checkpoint is never run
    "training": "attention_dropout hidden_dropout embd_pdrop resid_pdrop attn_pdrop classifier_dropout "
    "initializer_range gradient_checkpointing router_aux_loss_coef aux_loss_alpha seq_aux ep_size "
    "router_jitter_noise output_router_logits embed_requires_grad",
    "what a pass returns besides": "output_hidden_states output_attentions return_dict use_return_dict "
    "tie_last_hidden_states",
    "how transformers computes the same": "use_cache pretraining_tp chunk_size_feed_forward attn_implementation "
    "_attn_implementation _attn_implementation_autoset _attn_implementation_internal experts_implementation "
    "_experts_implementation _experts_implementation_internal torchscript use_bfloat16 use_flash_attn "
    "cache_implementation",
    "tasks other than text": "id2label label2id num_labels problem_type task_specific_params finetuning_task",
    "of encoders, which these models lack": "add_cross_attention cross_attention_hidden_size is_decoder "
    "decoder_start_token_id tie_encoder_decoder",
    "the tokenizer's": "bos_token_id pad_token_id sep_token_id unk_token_id tokenizer_class prefix",
    "follows from other keys": "qk_head_dim num_nextn_predict_layers num_mtp_layers mtp_num_hidden_layers "
    "initial_context_length",
    "of images and videos, which are not read": "vision_config image_token_id video_token_id "
    "vision_start_token_id vision_end_token_id image_token_index boi_token_index eoi_token_index",
    "of images and sounds, likewise": "audio_config audio_token_id boi_token_id eoi_token_id boa_token_id "
    "eoa_token_id eoa_token_index vision_soft_tokens_per_image",
    "nothing by itself": "use_sliding_window max_window_layers",  # in families that do not read it
}
NO_EFFECT: Mapping[str, str] = {key: why for why, keys in _NO_EFFECT.items() for key in keys.split()}

# ---- settings of generation: every field of ``transformers.GenerationConfig`` is on one list (a test compares them)

# What holds where neither the command nor a row gives another value, by their names in ``SamplingParams``.
TAKEN = {
    "repetition_penalty": "repetition_penalty",
    "suppress_tokens": "suppress_tokens",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "stop_strings": "stop",
    "min_new_tokens": "min_tokens",
    "bad_words_ids": "bad_words_ids",
    "begin_suppress_tokens": "begin_suppress_tokens",
}
# What the command decides, whatever the file says: whether texts are sampled (a run whose drafts are to be measured is
# not to become one that draws because of the model that it names), how long they are and how many. Filters that only
# sampled texts know and that are not supported are left too. With the values that mean nothing.
LEFT: Mapping[str, tuple[object, ...]] = {
    "do_sample": (False,),
    "temperature": (1.0,),
    "max_new_tokens": (),
    "max_length": (20,),
    "max_time": (),
    "num_return_sequences": (1,),
    "typical_p": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "top_h": (),
}
# What changes greedy texts too and is not supported, with the values that mean nothing.
REFUSED: Mapping[str, tuple[object, ...]] = {
    "min_length": (0,),
    "sequence_bias": ({}, []),
    "no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1.0,),
    "encoder_no_repeat_ngram_size": (0,),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "exponential_decay_length_penalty": (),
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "constraints": (),
    "force_words_ids": (),
    "penalty_alpha": (0.0,),
    "dola_layers": (),
    "guidance_scale": (1.0,),
    "watermarking_config": (),
    "token_healing": (False,),
}
# What changes no token of a text. What a config.json has of its own, too; what some models' own code reads; and how
# transformers computes and drafts, what it returns, and settings of beams alone (``num_beams`` is refused).
_OF_MODELS = _names(
    "eos_token_id bos_token_id pad_token_id decoder_start_token_id use_cache cache_implementation output_attentions "
    "output_hidden_states transformers_version"
)
_OF_OTHERS = _names(
    "_from_model_config _commit_hash _original_object_hash chat_format max_window_size user_token_id "
    "assistant_token_id auto_map"
)
WITHOUT_EFFECT = (
    _OF_MODELS
    | _OF_OTHERS
    | _names(
        "cache_config max_cache_len low_memory prefill_chunk_size compile_config disable_compile "
        "continuous_batching_config is_assistant num_assistant_tokens num_assistant_tokens_schedule "
        "assistant_early_exit assistant_confidence_threshold assistant_lookbehind assistant_ensemble_weight "
        "target_lookbehind prompt_lookup_num_tokens max_matching_ngram_size speculation_type use_mtp output_scores "
        "output_logits return_dict_in_generate early_stopping length_penalty diversity_penalty "
        "remove_invalid_values renormalize_logits"  # a logit that is not finite ends a text here
    )
)
# Those that old files keep in config.json; transformers reads them there without a generation_config.json
GENERATION = frozenset((*TAKEN, *LEFT, *REFUSED, *WITHOUT_EFFECT)) - _OF_MODELS - _OF_OTHERS

# ---- families


@dataclass(frozen=True, kw_only=True)
class Keys:
    """What the reader of one family does with the keys of a ``config.json``."""

    read: frozenset[str]
    only: Only = field(default_factory=dict)  # beside those of every family
    # of transformers, where the reader has another or none
    defaults: Mapping[str, Any] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)  # other names of keys that are read


_EVERY = _names(
    "architectures vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads "
    "head_dim rms_norm_eps max_position_embeddings tie_word_embeddings dtype torch_dtype eos_token_id rope_parameters "
    "rope_scaling rope_theta partial_rotary_factor original_max_position_embeddings sliding_window layer_types "
    "quantization_config compression_config"
)
_EXPERTS = frozenset({"moe_intermediate_size", "num_experts_per_tok", "norm_topk_prob"})
_LATENTS = _EXPERTS | _names(
    "attention_bias kv_lora_rank q_lora_rank qk_rope_head_dim qk_nope_head_dim v_head_dim rope_interleave "
    "n_routed_experts n_shared_experts routed_scaling_factor n_group topk_group first_k_dense_replace "
    "mlp_layer_types"
)
_PER_TOKEN = {"experts_per_token": "num_experts_per_tok"}
_WINDOW_DEFAULTS = {"use_sliding_window": False, "sliding_window": 4096}
LLAMA = Keys(read=_EVERY | {"attention_bias", "mlp_bias"})
QWEN2 = Keys(
    read=_EVERY | {"use_sliding_window", "max_window_layers"},
    defaults={**_WINDOW_DEFAULTS, "max_window_layers": 28, "num_key_value_heads": 32},
)
QWEN3 = Keys(read=QWEN2.read | {"attention_bias"}, defaults={**QWEN2.defaults, "head_dim": 128})
QWEN3_MOE = Keys(
    read=_EVERY
    | _EXPERTS
    | _names("use_sliding_window attention_bias num_experts decoder_sparse_step mlp_only_layers"),
    defaults={**_WINDOW_DEFAULTS, "num_key_value_heads": 4},
    aliases=_PER_TOKEN | {"num_local_experts": "num_experts"},  # as transformers 5 saves it
)
GPT_OSS = Keys(
    read=_EVERY | _names("attention_bias num_local_experts num_experts_per_tok swiglu_alpha swiglu_limit"),
    defaults={
        "attention_bias": True,
        "head_dim": 64,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150_000.0,
        "sliding_window": 128,
    },
    aliases=_PER_TOKEN | {"num_experts": "num_local_experts"},
)
DEEPSEEK_V3 = Keys(
    read=_EVERY | _LATENTS,
    only=_OF_ROUTERS,
    defaults={"first_k_dense_replace": 3, "q_lora_rank": 1536, "num_key_value_heads": 128},
    aliases=_PER_TOKEN | {"num_local_experts": "n_routed_experts", "head_dim": "qk_rope_head_dim"},
)
GLM4_MOE_LITE = replace(
    DEEPSEEK_V3,
    defaults={
        "first_k_dense_replace": 1,
        "q_lora_rank": 768,
        "num_key_value_heads": 20,
        "rms_norm_eps": 1e-5,
    },
)
_DELTA = _names(
    "linear_num_key_heads linear_num_value_heads linear_key_head_dim linear_value_head_dim linear_conv_kernel_dim "
    "full_attention_interval attention_bias"
)
_HYBRID_DEFAULTS = {"head_dim": 256, "partial_rotary_factor": 0.25, "full_attention_interval": 4}
QWEN3_5 = Keys(
    read=_EVERY | _DELTA, only=_OF_HYBRIDS, defaults={**_HYBRID_DEFAULTS, "num_key_value_heads": 4}
)
_SHARED = _names("moe_intermediate_size shared_expert_intermediate_size num_experts num_experts_per_tok")
QWEN3_5_MOE = Keys(
    read=(_EVERY - {"intermediate_size"}) | _DELTA | _SHARED,
    only=_OF_HYBRIDS,
    defaults={**_HYBRID_DEFAULTS, "num_key_value_heads": 2},
)
QWEN3_NEXT = replace(
    QWEN3_5_MOE,
    read=_EVERY | _DELTA | _SHARED | _names("norm_topk_prob decoder_sparse_step mlp_only_layers"),
    defaults={**QWEN3_5_MOE.defaults, "norm_topk_prob": True},
)
LLAMA4 = Keys(
    read=_EVERY
    | _names(
        "attention_bias intermediate_size_mlp num_local_experts num_experts_per_tok moe_layers use_qk_norm "
        "interleave_moe_layer_step no_rope_layers no_rope_layer_interval attention_chunk_size "
        "attn_temperature_tuning floor_scale attn_scale"
    ),
    defaults={
        "intermediate_size_mlp": 16384,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "num_experts_per_tok": 1,
        "num_local_experts": 16,
        "interleave_moe_layer_step": 1,
        "use_qk_norm": True,
        "no_rope_layer_interval": 4,
        "attention_chunk_size": 8192,
        "attn_temperature_tuning": True,
        "floor_scale": 8192,
        "attn_scale": 0.1,
    },
)
LLAMA4_HEADS = replace(LLAMA4, read=LLAMA4.read | {"draft_vocab_size"})
_OF_ONE_ROTATION = "rope_scaling rope_theta partial_rotary_factor original_max_position_embeddings"
_BY_LAYER = "rotations are of kinds of layers here: write it into rope_parameters"
GEMMA4 = Keys(
    read=_EVERY - _names(_OF_ONE_ROTATION)
    | _names(
        "attention_bias hidden_activation global_head_dim num_global_key_value_heads per_layer_config "
        "attention_k_eq_v num_kv_shared_layers use_double_wide_mlp hidden_size_per_layer_input "
        "vocab_size_per_layer_input final_logit_softcapping use_bidirectional_attention enable_moe_block num_experts "
        "top_k_experts moe_intermediate_size"
    ),
    only=_held(_OF_ONE_ROTATION, (None, {}), _BY_LAYER),
    defaults={
        "hidden_activation": "gelu_pytorch_tanh",
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262_144,
        "sliding_window": 512,
        "tie_word_embeddings": True,
    },
)
# The 12B has no experts and no inputs of layers
_UNIFIED = _held(
    "hidden_size_per_layer_input vocab_size_per_layer_input enable_moe_block num_experts top_k_experts "
    "moe_intermediate_size",
    (*_OFF, 262_144),
)
GEMMA4_UNIFIED = Keys(
    read=GEMMA4.read - _UNIFIED.keys(),
    only={**GEMMA4.only, **_UNIFIED},
    defaults={name: value for name, value in GEMMA4.defaults.items() if name not in _UNIFIED}
    | {"sliding_window": 1024},
)
# Of layers like a Gemma 4's in heads, which have neither
GEMMA4_HEADS = replace(
    GEMMA4_UNIFIED,
    read=GEMMA4_UNIFIED.read | {"draft_vocab_size"},
    defaults={name: value for name, value in GEMMA4_UNIFIED.defaults.items() if name != "sliding_window"},
)
GEMMA4_ASSISTANT = replace(
    GEMMA4_HEADS,
    read=GEMMA4_HEADS.read
    | _names("backbone_hidden_size use_ordered_embeddings num_centroids centroid_intermediate_top_k"),
)
_SECTIONS = ("transformer_layer_config", "eagle_config", "dflash_config")  # of heads
HEADS = Keys(
    read=LLAMA.read
    | {"use_sliding_window", "transformer_layer_config", "eagle_config"}
    | _names(
        "draft_vocab_size target_hidden_size eagle_aux_hidden_state_layer_ids norm_before_residual norm_before_fc "
        "fc_norm norm_output use_aux_hidden_state parallel_drafting mask_token_id pard_token ptd_token_id "
        "speculators_model_type speculators_config speculators_version qkv_bias bias"
    )
)
DFLASH = Keys(
    read=LLAMA.read
    | {"use_sliding_window", "transformer_layer_config", "dflash_config"}
    | _names(
        "draft_vocab_size target_hidden_size block_size mask_token_id target_layer_ids aux_hidden_state_layer_ids "
        "num_target_layers is_causal causal sample_from_anchor sliding_window_non_causal markov_rank markov_head_type "
        "enable_confidence_head confidence_head_with_markov input_embedding_scale output_multiplier "
        "attention_value_scale final_logit_softcapping attention_sink_bias use_swa swa_window_size attention_mode "
        "projector_type conv_kernel_size conv_group_size selector_rank selector_top_k "
        "num_anchors dflash_query_causal log_snr_conditioning enable_qwen35_gated_q_proj "
        "draft_ffn_type num_experts num_experts_per_tok moe_intermediate_size shared_expert_intermediate_size "
        "moe_experts_implementation "  # of experts, which there are none of where draft_ffn_type is dense
        "speculators_model_type speculators_config speculators_version max_window_layers"
    )
)
_OF_TRAINING = _names(  # of DeepSpec's files
    "target_model_type target_text_model_type target_model_name_or_path ttt_length step_loss_decay "
    "draft_num_hidden_layers num_anchors"
)
GEMMA4_DFLASH = replace(GEMMA4_HEADS, read=GEMMA4_HEADS.read | DFLASH.read | _OF_TRAINING)
GEMMA4_EAGLE3 = replace(
    GEMMA4_HEADS,
    read=GEMMA4_HEADS.read | {"num_target_layers", "target_layer_ids", "target_hidden_size"} | _OF_TRAINING,
)


def known_keys(config: Raw, keys: Keys) -> dict[str, Any]:
    """What the reader of a target's family gets of its ``config.json``: the keys that it reads, with their defaults.

    ``UserError`` for a value that would change results and is not supported.
    """
    config = text_part(config)
    refuse_values(config, {name: each for name, each in _ONLY.items() if name not in keys.read})
    refuse_values(config, keys.only)
    found = {name: value for name, value in config.items() if name in keys.read}
    for alias, name in keys.aliases.items():
        if config.get(alias) is not None:
            require(
                config.get(name) in (None, config[alias]),
                f"{name} is {shown(config.get(name))} and {alias} {shown(config[alias])}, which are two names of one "
                "number: config.json is wrong",
            )
            found[name] = config[alias]
    return {**keys.defaults, **found}


def refuse_values(config: Raw, only: Only = _ONLY) -> None:
    """``UserError`` for the first key whose value would change results and is not supported."""
    for name, (values, why) in only.items():
        supported = " or ".join(shown(value) for value in values if value is not None) or "null"
        require(
            name not in config or config[name] in values,
            f"{name} is {shown(config.get(name))}: only {supported} is supported, {why}",
        )


def unread_keys(config: Raw, keys: Keys) -> tuple[str, ...]:
    """Keys that say something and are on no list: nothing reads them, so that what they say does not hold."""
    config = text_part(config)
    known = keys.read | keys.only.keys() | keys.aliases.keys() | _ONLY.keys() | NO_EFFECT.keys() | GENERATION
    found = {name for name, value in config.items() if (value or value is False) and name not in known}
    found |= unread_parameters({**keys.defaults, **config})
    for each in (section(config, name) for name in _SECTIONS if name in keys.read):
        found.update(unread_keys(each, replace(keys, read=keys.read - set(_SECTIONS))))
    return tuple(sorted(found))


def listed(keys: tuple[str, ...]) -> str:
    """On one line of bounded length, whatever a file has for keys."""
    names = [
        key if key.replace(".", "").isidentifier() and len(key) <= _LONGEST else shown(key)
        for key in keys[:_MOST]
    ]
    return ", ".join(names) + (f" and {len(keys) - _MOST} more" if len(keys) > _MOST else "")


def generation_defaults(config: Raw) -> dict[str, Any]:
    """Defaults of generation in a ``config.json``, which count where there is no ``generation_config.json``."""
    said = {**section(config, "text_config"), **config}
    return {name: value for name, value in said.items() if name in GENERATION and value is not None}
