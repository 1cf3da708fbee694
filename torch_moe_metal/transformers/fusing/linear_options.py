"""How mixers with a recurrent state differ, as functions: options of `records.LinearAttention`.

`sizes` says how many heads a mixer has, and how wide they are: J, A, D and V. `split` gets the results of the input
projections and returns q, k, v, decay, beta and gate as `linear_attention_` takes them: views, nothing is copied.
`parameters` returns log_rate, decay_bias, norm_weight and skip. They are read at every call, since they may be moved,
cast, loaded or tied at any time.
"""

from .members import member

# ------------------------------------------------------------------------------------------------ gated delta nets


def delta_net_sizes(mixer):
    return mixer.num_k_heads, mixer.num_v_heads, mixer.head_k_dim, mixer.head_v_dim


def delta_net(mixer, qkv, z, beta, decay):
    """Qwen3.5: q, k and v one after the other."""
    J, A, D, V = delta_net_sizes(mixer)
    q, k, v = qkv.split_with_sizes([J * D, J * D, A * V], -1)
    return (
        q.unflatten(-1, (J, D)),
        k.unflatten(-1, (J, D)),
        v.unflatten(-1, (A, V)),
        decay,
        beta,
        z.unflatten(-1, (A, V)),
    )


def grouped_delta_net(mixer, qkvz, ba):
    """Qwen3-Next: for each key head its q and k, then v and z of its value heads."""
    J, A, D, V = delta_net_sizes(mixer)
    G = A // J
    q, k, v, z = qkvz.unflatten(-1, (J, -1)).split_with_sizes([D, D, G * V, G * V], -1)
    beta, decay = ba.unflatten(-1, (J, -1)).split_with_sizes([G, G], -1)
    return q, k, v.unflatten(-1, (G, V)), decay, beta, z.unflatten(-1, (G, V))


def delta_net_parameters(mixer):
    return member(mixer, "A_log"), member(mixer, "dt_bias"), member(mixer._modules["norm"], "weight"), None


# ------------------------------------------------------------------------------------------------ a decay per channel


def channel_sizes(mixer):
    return mixer.num_heads, mixer.num_heads, mixer.head_dim, mixer.head_dim


def channel_delta(mixer, q, k, v, beta, decay, gate):
    """A decay of each channel."""
    heads = (mixer.num_heads, mixer.head_dim)
    q, k, v, decay, gate = (x.unflatten(-1, heads) for x in (q, k, v, decay, gate))
    return q, k, v, decay, beta, gate


def low_rank_channel_delta(mixer, q, k, v, beta, decay, gate):
    """The same, with decay and gate of low rank."""
    decay = mixer.product(decay, mixer._modules["forget_gate"]._modules["f_b_proj"])
    return channel_delta(mixer, q, k, v, beta, decay, mixer.product(gate, mixer._modules["g_b_proj"]))


def channel_parameters(mixer):
    forget = mixer._modules["forget_gate"]
    bias = member(forget, "dt_bias").view(mixer.num_heads, mixer.head_dim)
    return member(forget, "A_log").flatten(), bias, member(mixer._modules["o_norm"], "weight"), None


def softplus_decay(mixer):
    return {}


def glm5_decay(mixer):
    return bounded_decay(mixer._modules["forget_gate"].safe_gate_lower_bound)


def bailing_decay(mixer):
    forget = mixer._modules["forget_gate"]
    return bounded_decay(forget.lower_bound if forget.safe_gate else None)


def bounded_decay(bound: float | None) -> dict:
    return {} if bound is None else {"decay_kind": "sigmoid", "lower_bound": bound}


# ------------------------------------------------------------------------------------------------ Mamba 2


def mamba2_sizes(mixer):
    return mixer.n_groups, mixer.num_heads, mixer.ssm_state_size, mixer.head_dim


def mamba2(mixer, projected):
    """z, x, B, C and dt one after the other; B is the key and C the query."""
    J, A, D, V = mamba2_sizes(mixer)
    z, v, k, q, step = projected.split_with_sizes([A * V, A * V, J * D, J * D, A], -1)
    return (
        q.unflatten(-1, (J, D)),
        k.unflatten(-1, (J, D)),
        v.unflatten(-1, (A, V)),
        step,
        None,
        z.unflatten(-1, (A, V)),
    )


def mamba2_parameters(mixer):
    norm = mixer._modules["norm"]
    weight = member(norm, "weight").view(-1, norm.group_size)
    return member(mixer, "A_log"), member(mixer, "dt_bias"), weight, member(mixer, "D")
