"""The tables of a run: every column's type and meaning. Columns that a run does not have are null.

Timing columns end in ``_seconds`` or ``_per_second``; they alone differ between two runs of one config.
"""

import pyarrow as pa

_KEYS = {
    "step": (pa.int64(), "rollout, from 1"),
    "update": (pa.int64(), "gradient update within the step, from 1"),
}
_UPDATE = {
    "loss": "the loss that was minimised (the negative objective, with the router's auxiliary loss if any)",
    "grad_norm": "norm of the gradient before clipping",
    "learning_rate": "of the optimizer",
    "entropy": "mean entropy of the full next-token distribution over response tokens, in nats",
    "token_ratio_mean": "mean of π_θ/π_old over response tokens",
    "token_ratio_max": "largest π_θ/π_old",
    "token_ratio_variance": "variance of π_θ/π_old over the response tokens of a mini-batch",
    "sequence_ratio_variance": "variance of s_i, the geometric mean of a response's ratios, over responses",
    "ess": "effective sample size per token of the ratio as a weight, (Σr)²/(NΣr²), 1 when all are equal",
    "clip_fraction": "share of response tokens that lose their gradient or are capped; null without a clip",
    "clip_fraction_low": "the part of clip_fraction below the band",
    "clip_fraction_high": "the part of clip_fraction above the band",
    "correction_weight": "mean weight that a correction gives a response token; null with correction=none",
    "correction_rejected": "share of response tokens to which a correction gives weight 0",
    "loss_number": "a number that the loss reports of itself: R²VPO's multiplier λ at the update; null for most",
    "expert_change_rate": "1 − mean |S_old ∩ S_new|/K over layers and response tokens, against the old policy's routes",
    "expert_set_change_rate": "share of (layer, response token) whose set of experts differs from the old policy's",
    "token_any_layer_change_rate": "share of response tokens whose set differs in at least one layer",
    "top1_change_rate": "share of (layer, response token) whose strongest expert differs from the old policy's",
    "router_kl": "KL of a router's old from its new distribution over all experts, mean over layers and tokens",
    "router_shift_mean": "RSPO's γ, e^−(mean |log p_new/p_old| over layers and old experts), mean over tokens",
    "router_shift_min": "the least γ of a token",
    "router_shift_p10": "the tenth percentile of γ over tokens",
    "router_shift_floored": "share of tokens with γ below 0.8",
    "replay_expert_disagreement": "1 − mean |S_executed ∩ S_live|/K: replayed experts that the router would not choose",
    "replay_set_disagreement": "share of (layer, response token) whose replayed set is not the router's own choice",
    "route_prediction_kl": "PR²: KL of the routers now from their prediction, mean over layers and response tokens",
    "router_margin": "the last chosen logit minus the first that was not, mean over layers and tokens",
    "router_confidence": "probability of the chosen experts together, mean over layers and tokens",
    "log_ratio_moment_free": "mean (log π_θ/π_old)² of a sample's tokens after the update, routers free in both",
    "log_ratio_moment_pinned": "the same with the routes of before the updates forced, prompt included",
    "log_ratio_moment_routing": "mean square of the difference of the two log-ratios",
    "log_ratio_covariance_routing": "mean product of that difference with the pinned log-ratio",
    "routing_share": "1 − pinned/free: the share of the log-ratio's second moment that goes when routes are pinned",
    "log_ratio_moment_changed": "the free one, of tokens whose route differs from the old one in any layer",
    "log_ratio_moment_unchanged": "the free one, of the other tokens",
    "expert_change_per_update": "expert-change rate from before to after one gradient update, on a fixed sample",
}
# How the updates of a step become its row, where that is not their mean.
_OF_UPDATES = {"token_ratio_max": "largest", "router_shift_min": "least", "routing_share": "from the mean moments"}
_STEP = {
    "reward": "mean score of all sampled responses, before shaping and whether trained on or dropped",
    "eval_accuracy": "mean score on the held-out prompts, one sampled response each, after the step",
    "shaped_reward": "mean reward that advantages were computed from: after length penalty and KL, of kept groups",
    "reference_kl": "k3 estimate of KL(π_old‖cold start) per response token; null without a KL term",
    "groups_without_signal": "share of sampled prompts whose responses all have the same score",
    "prompts_sampled": "prompts that were sampled to fill the step; more than rollout.prompts with dynamic sampling",
    "response_length": "mean response tokens of the kept groups, the end token included",
    "rollout_kl_k1": "k1 estimate of KL(μ‖π_old): sampling policy against training forward",
    "rollout_kl_k3": "k3 estimate of the same",
    "rollout_chi2_token": "χ² of ρ = π_old/μ over response tokens, mean ρ² − 1",
    "rollout_chi2_sequence": "χ² of the product of ρ over a response",
    "rollout_ess": "effective sample size per token of ρ as a weight, before any correction",
    "rollout_extreme_share": "share of response tokens with ρ or 1/ρ above 2 (R3's F(2))",
    "rollout_probability_correlation": "Pearson correlation of the tokens' probabilities under μ and π_old",
    "rollout_logprob_gap_max": "largest |log μ − log π_old| of a response token",
    "rollout_expert_disagreement": "expert-change rate between sampling and training forward, same weights",
    "rollout_set_disagreement": "share of (layer, response token) whose set differs between sampling and training",
    "rollout_any_layer_disagreement": "share of response tokens whose set differs in at least one layer",
    "rollout_top1_disagreement": "share of (layer, response token) whose strongest expert differs",
    "rollout_router_kl": "KL of a router's distribution in sampling from that in training, over layers and tokens",
    "rollout_router_shift_mean": "RSPO's γ between sampling and training, over the sampler's experts; mean over tokens",
    "rollout_router_shift_min": "the least of it",
    "rollout_router_shift_p10": "its tenth percentile",
    "rollout_router_shift_floored": "share of tokens with it below 0.8",
    "expert_change_since_start": "expert-change rate against the cold start, on a fixed probe batch",
    "load_entropy": "entropy of the experts' load over log E, mean over layers; 1 is even",
    "load_max_violation": "largest load times E, minus 1, worst layer; 0 is even",
    "dead_experts": "share of experts that no response token of the rollout chose, mean over layers",
    "rollout_seconds": "sampling and scoring",
    "old_policy_seconds": "the old policy's forward; with savings.reuse_first the first update's too",
    "probe_seconds": "forwards for expert_change_per_update and expert_change_since_start",
    "update_seconds": "forward, loss, backward, optimizer and metrics of all updates, but what old_policy_seconds has",
    "evaluation_seconds": "held-out accuracy; null in steps without",
    "rollout_tokens_per_second": "sampled response tokens per second of sampling, dropped groups included",
    "update_tokens_per_second": "prompt and response tokens per second of update_seconds",
}
_LAYER = {
    "expert_change_rate": "as in updates, of this layer",
    "expert_set_change_rate": "as in updates, of this layer",
    "top1_change_rate": "as in updates, of this layer",
    "router_kl": "as in updates, of this layer",
    "router_margin": "as in updates, of this layer",
    "router_confidence": "as in updates, of this layer",
    "expert_change_per_update": "as in updates, of this layer",
    "load_entropy": "of the mini-batch's response tokens, or the rollout's for update 0",
    "load_max_violation": "likewise",
    "dead_experts": "likewise: share of experts that no token chose",
    "rollout_expert_disagreement": "as in steps, of this layer; update 0 only",
    "rollout_set_disagreement": "likewise",
    "rollout_top1_disagreement": "likewise",
    "rollout_router_kl": "likewise",
    "expert_change_since_start": "as in steps, of this layer; update 0 only",
}

# Columns in [0, 1]: shares, probabilities and means of scores (``tasks.Task.score``). Their intervals stay there too.
IN_UNIT = frozenset(
    {
        *("reward", "eval_accuracy", "score", "groups_without_signal"),
        *("ess", "rollout_ess", "clip_fraction", "clip_fraction_low", "clip_fraction_high", "correction_rejected"),
        *("expert_change_rate", "expert_set_change_rate", "token_any_layer_change_rate", "top1_change_rate"),
        *("expert_change_per_update", "expert_change_since_start"),
        *("replay_expert_disagreement", "replay_set_disagreement"),
        *("rollout_expert_disagreement", "rollout_set_disagreement"),
        *("rollout_any_layer_disagreement", "rollout_top1_disagreement"),
        *(f"{prefix}router_shift_{what}" for prefix in ("", "rollout_") for what in ("mean", "min", "p10", "floored")),
        *("rollout_extreme_share", "router_confidence", "load_entropy", "dead_experts"),
    }
)


def bounds(metric: str) -> tuple[float, float] | None:
    """The ends of what a metric can be, where it has both; also of a run's last, best, median or mean value of it."""
    return (0.0, 1.0) if metric in IN_UNIT else None


def _numbers(meanings: dict[str, str]) -> dict[str, tuple[pa.DataType, str]]:
    return {name: (pa.float64(), meaning) for name, meaning in meanings.items()}


TABLES: dict[str, dict[str, tuple[pa.DataType, str]]] = {
    "steps": {"step": _KEYS["step"]}
    | _numbers(_STEP)
    | _numbers(
        {name: f"{meaning}; {_OF_UPDATES.get(name, 'mean')} of the updates" for name, meaning in _UPDATE.items()}
    )
    | {
        "response_tokens": (pa.int64(), "response tokens that were trained on"),
        "tokens_sampled": (pa.int64(), "response tokens that were sampled, those of dropped groups too"),
        "token_ratio_histogram": (
            pa.list_(pa.int64()),
            "counts of log π_θ/π_old over the step's updates: below −1, 40 bins of 0.05, above 1",
        ),
        "sequence_log_ratio_variance_histogram": (
            pa.list_(pa.int64()),
            "counts of Var_i = (1/T) Σ_t (log r_t − log s_i)², one a response and update: below 1e-8, "
            "32 bins of a quarter of a decade, above 1",
        ),
        "changed_slots_histogram": (
            pa.list_(pa.int64()),
            "counts of (layer, response token) over the step's updates by experts that differ from the old: 0 to K",
        ),
        "rollout_changed_slots_histogram": (
            pa.list_(pa.int64()),
            "counts of (layer, response token) by experts that differ between sampling and training: 0 to K",
        ),
    },
    "updates": _KEYS | _numbers(_UPDATE),
    "layers": {
        "step": _KEYS["step"],
        "update": (pa.int64(), "gradient update from 1; 0 is the rollout before the first"),
        "layer": (pa.int64(), "MoE layer, from 0"),
    }
    | _numbers(_LAYER),
    "evaluations": {
        "step": (pa.int64(), "after how many steps; 0 is the cold start"),
        "prompt": (pa.string(), "held-out prompt"),
        "score": (pa.float64(), "its reward"),
    },
}


def to_markdown(table: str) -> str:
    """The columns of one table and their meaning, as the README shows them; of steps, those it alone has."""
    rows = [
        f"| `{name}` | {meaning.replace('|', '&#124;')} |"
        for name, (_, meaning) in TABLES[table].items()
        if table != "steps" or name not in _UPDATE
    ]
    return "\n".join(["| column | meaning |", "|---|---|", *rows])
