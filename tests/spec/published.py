"""Fields of published models' ``config.json``, as on the Hugging Face hub, that bear on KV."""

from __future__ import annotations

from typing import Any

LENGTHS = (4096, 32_768, 131_072)
SOURCES = {  # the model's repository on the Hugging Face hub, and transformers' class that reads its file
    "Llama-3.1-8B": ("meta-llama/Llama-3.1-8B", "LlamaConfig"),
    "Qwen2.5-7B-Instruct": ("Qwen/Qwen2.5-7B-Instruct", "Qwen2Config"),
    "Qwen3-8B": ("Qwen/Qwen3-8B", "Qwen3Config"),
    "Mistral-7B-v0.1": ("mistralai/Mistral-7B-v0.1", "MistralConfig"),
    "Mistral-7B-v0.3": ("mistralai/Mistral-7B-v0.3", "MistralConfig"),
    "gemma-2-9b": ("google/gemma-2-9b", "Gemma2Config"),
    "gemma-3-27b-it": ("google/gemma-3-27b-it", "Gemma3TextConfig"),
    "gemma-3-270m": ("google/gemma-3-270m", "Gemma3TextConfig"),
    "gemma-3n-E4B-it": ("google/gemma-3n-E4B-it", "Gemma3nTextConfig"),
    "gpt-oss-120b": ("openai/gpt-oss-120b", "GptOssConfig"),
    "Llama-4-Scout-17B-16E": ("meta-llama/Llama-4-Scout-17B-16E", "Llama4TextConfig"),
    "DeepSeek-V2-Lite": ("deepseek-ai/DeepSeek-V2-Lite", "DeepseekV2Config"),
    "DeepSeek-V3": ("deepseek-ai/DeepSeek-V3", "DeepseekV3Config"),
    "Kimi-K2-Instruct": ("moonshotai/Kimi-K2-Instruct", "DeepseekV3Config"),
    "Qwen3-Next-80B-A3B": ("Qwen/Qwen3-Next-80B-A3B-Instruct", "Qwen3NextConfig"),
    "Jamba-v0.1": ("ai21labs/Jamba-v0.1", "JambaConfig"),
    "granite-4.0-h-small": ("ibm-granite/granite-4.0-h-small", "GraniteMoeHybridConfig"),
    "phi-4": ("microsoft/phi-4", "Phi3Config"),
    "GLM-4-9B-0414": ("zai-org/GLM-4-9B-0414", "Glm4Config"),
    "GLM-4.5": ("zai-org/GLM-4.5", "Glm4MoeConfig"),
}
CONFIGS: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B": {
        "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "max_position_embeddings": 131_072, "torch_dtype": "bfloat16",
    },
    "Qwen2.5-7B-Instruct": {
        "model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "use_sliding_window": False, "sliding_window": 131_072, "max_window_layers": 28,
        "max_position_embeddings": 32_768, "torch_dtype": "bfloat16",
    },
    "Qwen3-8B": {
        "model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "use_sliding_window": False, "sliding_window": None,
        "max_window_layers": 36, "torch_dtype": "bfloat16",
    },
    "Mistral-7B-v0.1": {
        "model_type": "mistral", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "sliding_window": 4096, "torch_dtype": "bfloat16",
    },
    "Mistral-7B-v0.3": {
        "model_type": "mistral", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "sliding_window": None, "torch_dtype": "bfloat16",
    },
    "gemma-2-9b": {
        "model_type": "gemma2", "hidden_size": 3584, "num_hidden_layers": 42, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 256, "sliding_window": 4096, "sliding_window_size": 4096,
        "query_pre_attn_scalar": 256, "cache_implementation": "hybrid", "torch_dtype": "float32",
    },
    "gemma-3-27b-it": {
        "model_type": "gemma3", "torch_dtype": "bfloat16", "mm_tokens_per_image": 256,
        "text_config": {
            "model_type": "gemma3_text", "hidden_size": 5376, "num_hidden_layers": 62, "num_attention_heads": 32,
            "num_key_value_heads": 16, "head_dim": 128, "sliding_window": 1024, "query_pre_attn_scalar": 168,
        },
    },
    "gemma-3-270m": {
        "model_type": "gemma3_text", "hidden_size": 640, "num_hidden_layers": 18, "num_attention_heads": 4,
        "num_key_value_heads": 1, "head_dim": 256, "sliding_window": 512, "_sliding_window_pattern": 6,
        "use_bidirectional_attention": False, "torch_dtype": "bfloat16",
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 3,
    },
    "gemma-3n-E4B-it": {
        "model_type": "gemma3n", "torch_dtype": "bfloat16",
        "audio_config": {"conf_attention_chunk_size": 12}, "vision_config": {},
        "text_config": {
            "model_type": "gemma3n_text", "hidden_size": 2048, "num_hidden_layers": 35, "num_attention_heads": 8,
            "num_key_value_heads": 2, "head_dim": 256, "sliding_window": 512, "num_kv_shared_layers": 15,
            "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
        },
    },
    "gpt-oss-120b": {
        "model_type": "gpt_oss", "hidden_size": 2880, "num_hidden_layers": 36, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128, "num_local_experts": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 18, "torch_dtype": "bfloat16",
    },
    "Llama-4-Scout-17B-16E": {
        "model_type": "llama4", "torch_dtype": "bfloat16",
        "text_config": {
            "model_type": "llama4_text", "hidden_size": 5120, "num_hidden_layers": 48, "num_attention_heads": 40,
            "num_key_value_heads": 8, "head_dim": 128, "attention_chunk_size": 8192, "no_rope_layers": [],
            "num_local_experts": 16, "for_llm_compressor": False,
        },
    },
    "DeepSeek-V2-Lite": {
        "model_type": "deepseek_v2", "hidden_size": 2048, "num_hidden_layers": 27, "num_attention_heads": 16,
        "num_key_value_heads": 16, "kv_lora_rank": 512, "q_lora_rank": None, "qk_rope_head_dim": 64,
        "n_routed_experts": 64,
        "qk_nope_head_dim": 128, "v_head_dim": 128, "torch_dtype": "bfloat16",
    },
    "DeepSeek-V3": {
        "model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128,
        "num_key_value_heads": 128, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64,
        "n_routed_experts": 256,
        "qk_nope_head_dim": 128, "v_head_dim": 128, "num_nextn_predict_layers": 1, "torch_dtype": "bfloat16",
    },
    "Kimi-K2-Instruct": {
        "model_type": "kimi_k2", "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 64,
        "num_key_value_heads": 64, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64,
        "n_routed_experts": 384,
        "qk_nope_head_dim": 128, "v_head_dim": 128, "torch_dtype": "bfloat16",
    },
    "Qwen3-Next-80B-A3B": {
        "model_type": "qwen3_next", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 16,
        "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4, "num_experts": 512, "torch_dtype": "bfloat16",
    },
    "Jamba-v0.1": {
        "model_type": "jamba", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "attn_layer_period": 8, "attn_layer_offset": 4, "mamba_d_state": 16,
        "mamba_d_conv": 4, "mamba_expand": 2, "mamba_dt_rank": 256, "mamba_conv_bias": True, "sliding_window": None,
        "num_experts": 16, "torch_dtype": "bfloat16",
    },
    "granite-4.0-h-small": {
        "model_type": "granitemoehybrid", "hidden_size": 4096, "num_hidden_layers": 40, "num_attention_heads": 32,
        "num_key_value_heads": 8, "mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 128, "mamba_d_head": 64,
        "mamba_d_conv": 4, "mamba_expand": 2, "mamba_chunk_size": 256,
        "num_local_experts": 72, "torch_dtype": "bfloat16",
        "layer_types": ["attention" if i in (5, 15, 25, 35) else "mamba" for i in range(40)],
    },
    "phi-4": {
        "model_type": "phi3", "hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 40,
        "num_key_value_heads": 10, "sliding_window": None, "torch_dtype": "bfloat16",
    },
    "GLM-4-9B-0414": {
        "model_type": "glm4", "hidden_size": 4096, "num_hidden_layers": 40, "num_attention_heads": 32,
        "num_key_value_heads": 2, "head_dim": 128, "torch_dtype": "bfloat16",
    },
    "GLM-4.5": {
        "model_type": "glm4_moe", "hidden_size": 5120, "num_hidden_layers": 92, "num_attention_heads": 96,
        "num_key_value_heads": 8, "head_dim": 128, "n_routed_experts": 160, "torch_dtype": "bfloat16",
    },
}  # fmt: skip
