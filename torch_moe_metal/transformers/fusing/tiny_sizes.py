"""Sizes of tiny models that several families share: parts of the `tiny` configurations in `families.py`."""

LOCAL = {"num_local_experts": 8}
QWEN = {"num_experts": 8, "norm_topk_prob": True}
QWEN_SHARED = QWEN | {"shared_expert_intermediate_size": 40}
DELTA_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
LINEAR_ATTENTION = DELTA_NET | {"layer_types": ["linear_attention", "full_attention"]}
LATENT_ATTENTION = {
    "head_dim": 8,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
GROUPS = {"n_routed_experts": 8, "n_shared_experts": 1, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1}
INDEXER = {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 64}
OCR_TEXT = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "mlp_layer_types": ["dense", "sparse"],
    "topk_method": "group_limited_greedy",
    "n_group": 4,
    "topk_group": 2,
}
WINDOW = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}
HYBRID_WINDOW = {
    "layer_types": ["linear_attention", "sliding_attention", "full_attention"],
    "num_hidden_layers": 3,
    "sliding_window": 16,
}
DELTA_ATTENTION = {"layer_types": ["linear_attention", "full_attention"], "linear_head_dim": 8, "linear_num_heads": 4}
MAMBA = {
    "layer_types": ["linear_attention", "full_attention"],
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 12,
}
NEMOTRON = {
    "layer_types": ["linear_attention", "moe", "full_attention", "mlp"],
    "num_hidden_layers": 4,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "ssm_state_size": 12,
    "time_step_min": 0.3,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 2.0,
    "original_max_position_embeddings": 4,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.3,
    "partial_rotary_factor": 1.0,
}
