"""How the routers of transformers map to the options of `gate`.

A routing function gets the router and the block, and returns arguments of `torch.ops.moe_metal.gate`. It reads the
parameters at every call, so they may be moved, cast, loaded or tied at any time.
"""

from .members import member

# ------------------------------------------------------------------------------------------------ softmax


def softmax(router, block):
    """The k best of the softmax over all experts, divided by their sum. This equals the softmax over the k best logits,
    which some models compute."""
    return {"router_weight": member(router, "weight"), "top_k": router.top_k}


def unnormalized(router, block):
    return softmax(router, block) | {"renormalize": "none"}


def softmax_optional(router, block):
    """The same, divided by their sum only if the configuration says so."""
    return softmax(router, block) if router.norm_topk_prob else unnormalized(router, block)


def gpt_oss(router, block):
    return softmax(router, block) | {"router_bias": member(router, "bias")}


def hunyuan_v1(router, block):
    return {"router_weight": router.wg.weight, "top_k": router.top_k}


def deepseek_v2(router, block):
    """The k best of the softmax within the best groups, without division by their sum and without a bias."""
    grouped = router.topk_method == "group_limited_greedy"
    return unnormalized(router, block) | {
        "scaling_factor": router.routed_scaling_factor,
        "n_group": router.num_group if grouped else 1,
        "topk_group": router.topk_group if grouped else 1,
        "group_score": "max",
    }


def mistral4(router, block):
    return softmax_optional(router, block) | {
        "scaling_factor": router.routed_scaling_factor,
        "n_group": router.num_group,
        "topk_group": router.topk_group,
    }


# ------------------------------------------------------------------------------------------------ sigmoid


def deepseek_v3(router, block):
    """The k best sigmoids by score + bias, within the best groups."""
    return mistral4(router, block) | {"scoring": "sigmoid", "select_bias": router.e_score_correction_bias}


def sigmoid_bias(router, block):
    """The k best sigmoids by score + bias, of all experts, divided by their sum."""
    return softmax(router, block) | {"scoring": "sigmoid", "select_bias": block.e_score_correction_bias}


def hy_v3(router, block):
    return sigmoid_bias(router, block) | {"scaling_factor": router.router_scaling_factor}


def minimax_m3(router, block):
    """The block scales the experts' sum, which equals scaling the weights."""
    return softmax(router, block) | {
        "scoring": "sigmoid",
        "select_bias": router.e_score_correction_bias,
        "scaling_factor": block.routed_scaling_factor,
    }


def laguna(router, block):
    return minimax_m3(router, block) | {"softcap": router.router_logit_softcapping}


def lfm2(router, block):
    """The k best sigmoids by score + bias, of all experts."""
    return softmax_optional(router, block) | {
        "scoring": "sigmoid",
        "select_bias": block.expert_bias if router.use_expert_bias else None,
        "scaling_factor": router.routed_scaling_factor,
        "sum_eps": 1e-6,
    }


def flint(router, block):
    return softmax_optional(router, block) | {"scoring": "sigmoid"}


def llama4(router, block):
    """The weight is the sigmoid of the logit; the block multiplies the expert's input by it."""
    return unnormalized(router, block) | {"scoring": "sigmoid"}
