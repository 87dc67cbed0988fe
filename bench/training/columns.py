"""The tables of a run: one object for each column. A column that a run does not have is null.

A new column is a line here and the line that computes it. From the line here follow the type on disk (``record``), the
list in docs/metrics.md of those that archives keep (``docs/generate.py``), how a step reduces its updates
(``token_metrics.of_step``), what archives keep, the bounds of intervals, labels of figures and tables.

Timing columns end in ``_seconds`` or ``_per_second``; with ``threads=1`` they alone differ between two runs of one
config."""

from dataclasses import dataclass, replace
from typing import Final, Literal

from steadymoe.bench.statistics.collapse import FINITE

# A step of torch.linspace in fp32, from whose edges every recorded histogram was counted.
_FP32_BIN = 0.05000000074505806
# Edges of the histogram of log π_θ/π_old: 40 bins of 0.05, and one open bin on either side.
LOG_RATIO_EDGES = tuple(-1 + _FP32_BIN * i if i < 20 else 1 - _FP32_BIN * (40 - i) for i in range(41))
# The same, as decimal logarithms, of a response's log-ratio variance: four bins a decade.
LOG10_VARIANCE_EDGES = tuple(-8 + i / 4 for i in range(33))
VARIANCE_EDGES = tuple(10.0**exponent for exponent in LOG10_VARIANCE_EDGES)
_LOG_RATIO_BINS = f"below −1, {len(LOG_RATIO_EDGES) - 1} bins of 0.05, above 1"
_VARIANCE_BINS = f"below 1e-8, {len(VARIANCE_EDGES) - 1} bins of a quarter of a decade, above 1"
_COUNTS: Final = "list<int64>"


@dataclass(frozen=True)
class Column:
    """One column of one table."""

    name: str
    meaning: str
    """A phrase that defines the column."""
    label: str = ""
    """What an axis calls it (``label``); its name where none is given."""
    short: str = ""
    """What the header of a table calls it (``short``); its label where none is given."""
    unit: str = ""
    """Of its numbers; none for shares, ratios, counts and scores."""
    type: Literal["float64", "int64", "string", "list<int64>"] = "float64"
    """On disk, by Arrow's name."""
    over_updates: Literal["mean", "largest", "least", "from the mean moments"] = "mean"
    """How a step reduces the numbers of its updates; of columns of updates alone."""
    share: bool = False
    """Whether it lies in [0, 1]: a share, a probability, or a mean of scores (``tasks.Task.score``)."""
    kept: bool = False
    """Whether archives keep it: tables and figures are made from it."""


_STEP_KEY = Column("step", "rollout, from 1", type="int64")
# fmt: off
UPDATE = (
    Column("loss", "the minimised loss (the negative objective, with the router's auxiliary loss if any)"),
    Column("grad_norm", "norm of the gradient before clipping", kept=True),
    Column("norm_cut", "whether the gradient was clipped (`optimizer.max_grad_norm`, `optimizer.autoclip`), 0 or 1; in "
           "steps, the share",
           label="cut updates (share)", short="norm cut", share=True, kept=True),
    Column("learning_rate", "the optimizer's learning rate"),
    Column("entropy", "mean entropy of the full next-token distribution over response tokens, in nats",
           label="entropy (nats)", unit="nats", kept=True),
    Column("token_ratio_mean", "mean of π_θ/π_old over response tokens"),
    Column("token_ratio_max", "largest π_θ/π_old", over_updates="largest"),
    Column("token_ratio_variance", "variance of π_θ/π_old over the response tokens of a mini-batch",
           label="variance of the token ratio", short="token-ratio variance", kept=True),
    Column("sequence_ratio_variance", "variance of s_i, the geometric mean of a response's ratios, over responses",
           short="sequence-ratio variance", kept=True),
    Column("ess", "effective sample size per token of the ratio as a weight, (Σr)²/(NΣr²), 1 when all are equal",
           share=True, kept=True),
    Column("clip_fraction", "share of response tokens that lose their gradient or are capped; null without a clip",
           label="clipped tokens (share)", short="clip fraction", share=True, kept=True),
    Column("clip_fraction_low", "the part of clip_fraction below the band", share=True),
    Column("clip_fraction_high", "the part of clip_fraction above the band", share=True),
    Column("correction_weight", "mean weight that a correction gives a response token; null with correction=none"),
    Column("correction_rejected", "share of response tokens to which a correction gives weight 0", share=True),
    Column("loss_number", "a loss-specific diagnostic: R²VPO's multiplier λ at the update; null for most losses"),
    Column("expert_change_rate",
           "1 − mean |S_old ∩ S_new|/K over layers and response tokens, against the old policy's routes",
           label="expert-change rate", short="expert change", share=True, kept=True),
    Column("expert_set_change_rate",
           "share of (layer, response token) whose set of experts differs from the old policy's", share=True),
    Column("token_any_layer_change_rate", "share of response tokens whose set differs in at least one layer",
           share=True, kept=True),
    Column("top1_change_rate", "share of (layer, response token) whose strongest expert differs from the old policy's",
           share=True),
    Column("router_kl", "KL of a router's old from its new distribution over all experts, mean over layers and tokens",
           unit="nats"),
    Column("router_shift_mean", "RSPO's γ, e^−(mean |log p_new/p_old| over layers and old experts), mean over tokens",
           share=True),
    Column("router_shift_min", "minimum γ over tokens", over_updates="least", share=True),
    Column("router_shift_p10", "the tenth percentile of γ over tokens", share=True),
    Column("router_shift_floored", "share of tokens with γ below 0.8", share=True),
    Column("replay_expert_disagreement",
           "1 − mean |S_executed ∩ S_live|/K: replayed experts that the router would not choose", share=True),
    Column("replay_set_disagreement",
           "share of (layer, response token) whose replayed set is not the router's own choice", share=True),
    Column("replay_share",
           "share of (layer, fed token) that ran the replayed experts; below 1 replay failed; null without replay",
           over_updates="least", share=True, kept=True),
    Column("replay_kept", "R3 filtered: share of the replayed experts that ran, over layers and fed tokens",
           share=True),
    Column("routing_lagged", "lagged routing: share of updates routed by old weights; below 1 with a trigger",
           share=True),
    Column("route_prediction_kl",
           "PR²: KL of the routers now from their prediction, mean over layers and response tokens", unit="nats"),
    Column("router_margin", "smallest chosen logit minus the largest one not chosen, mean over layers and tokens"),
    Column("router_confidence", "probability of the chosen experts together, mean over layers and tokens", share=True),
    Column("log_ratio_moment_free",
           "mean (log π_θ/π_old)² of a sample's tokens after the update, routers free in both", kept=True),
    Column("log_ratio_moment_pinned",
           "mean (log π_θ/π_old)² with the pre-update routes forced, prompt included", kept=True),
    Column("log_ratio_moment_routing", "mean square of the difference between the free and the pinned log-ratio"),
    Column("log_ratio_covariance_routing", "mean product of that difference and the pinned log-ratio"),
    Column("routing_share",
           "1 − pinned/free: the share of the log-ratio's second moment that vanishes when routes are pinned",
           over_updates="from the mean moments", kept=True),
    Column("log_ratio_moment_changed",
           "log_ratio_moment_free of the tokens whose route differs from the old one in any layer", kept=True),
    Column("log_ratio_moment_unchanged", "log_ratio_moment_free of the other tokens", kept=True),
    Column("log_ratio_moment_top",
           "share of the sum of (log π_θ/π_old)² of a sample that lies in the 0.1 % of its tokens that moved most",
           share=True, kept=True),
    Column("log_ratio_moment_top_changed", "the part of log_ratio_moment_top in tokens whose route changed",
           share=True, kept=True),
    Column("relative_step_routers", "‖ΔW‖/‖W‖ of all routers together in one update", kept=True),
    Column("relative_step_others", "‖ΔW‖/‖W‖ of all other weights together in one update", kept=True),
    Column("expert_change_per_update", "expert-change rate from before to after one gradient update, on a fixed sample",
           short="expert change per update", share=True, kept=True),
)
STEP = (
    Column("reward", "mean score of all sampled responses, before shaping and whether trained on or dropped",
           label="training reward", short="reward", share=True, kept=True),
    Column("eval_accuracy", "mean score on the held-out prompts, one sampled response each, after the step",
           label="held-out accuracy", share=True, kept=True),
    Column("eval_greedy",
           "the same for the greedy response; with measure=little only before the first and after the last step",
           label="greedy held-out accuracy", short="greedy", share=True, kept=True),
    Column("eval_pass",
           "mean over evaluation.pass_prompts held-out prompts of the best score of evaluation.pass_k sampled "
           "responses; before the first and after the last step",
           label="pass@k", short="pass@k", share=True, kept=True),
    Column("eval_accuracy_permuted",
           "eval_accuracy if every token runs the experts of another token; null unless evaluation.permuted_routes",
           share=True, kept=True),
    Column("shaped_reward", "mean reward behind the advantages: after length penalty and KL, over kept groups"),
    Column("reference_kl", "k3 estimate of KL(π_old‖cold start) per response token; null without a KL term",
           unit="nats"),
    Column("groups_without_signal",
           "share of sampled prompts whose responses all have equal rewards, after length penalty and KL", share=True),
    Column("prompts_sampled",
           "prompts sampled to fill the step; more than a rollout has with dynamic sampling", kept=True),
    Column("response_length", "mean response tokens of the kept groups, the end token included", unit="tokens"),
    Column("rollout_kl_k1", "k1 estimate of KL(μ‖π_old): sampling policy against training forward", unit="nats"),
    Column("rollout_kl_k3", "k3 estimate of KL(μ‖π_old)",
           label="KL of sampler from trainer (k3)", short="KL(μ‖π_old)", unit="nats", kept=True),
    Column("rollout_chi2_token", "χ² of ρ = π_old/μ over response tokens, mean ρ² − 1"),
    Column("rollout_chi2_sequence", "χ² of the product of ρ over a response"),
    Column("rollout_ess", "effective sample size per token of ρ as a weight, before any correction", share=True),
    Column("rollout_ratio_mean",
           "mean of ρ over response tokens: the kept probability if the sampler truncates and its mask is not replayed",
           label="mean ratio of trainer over sampler", kept=True),
    Column("rollout_outside_share", "share of response tokens with ρ outside [0.9, 1.1]", share=True, kept=True),
    Column("rollout_extreme_share", "share of response tokens with ρ or 1/ρ above 2 (R3's F(2))", share=True,
           kept=True),
    Column("rollout_probability_correlation", "Pearson correlation of the tokens' probabilities under μ and π_old"),
    Column("rollout_logprob_gap_max", "largest |log μ − log π_old| of a response token", unit="nats"),
    Column("rollout_expert_disagreement", "expert-change rate between sampling and training forward, same weights",
           short="sampler–trainer disagreement", share=True, kept=True),
    Column("rollout_set_disagreement",
           "share of (layer, response token) whose set differs between sampling and training", share=True, kept=True),
    Column("rollout_any_layer_disagreement", "share of response tokens whose set differs in at least one layer",
           share=True, kept=True),
    Column("rollout_top1_disagreement", "share of (layer, response token) whose strongest expert differs", share=True,
           kept=True),
    Column("rollout_router_kl",
           "KL of a router's distribution in sampling from its distribution in training, over layers and tokens",
           unit="nats"),
    Column("rollout_router_shift_mean",
           "RSPO's γ between sampling and training, over the sampler's experts; mean over tokens", share=True),
    Column("rollout_router_shift_min", "minimum γ over tokens between sampling and training", share=True),
    Column("rollout_router_shift_p10", "the tenth percentile of γ over tokens between sampling and training",
           share=True),
    Column("rollout_router_shift_floored", "share of tokens with γ below 0.8 between sampling and training",
           share=True),
    Column("replay_kl", "R3: k3 estimate of KL(μ‖π_old) on the probe's responses, with the sampler's routes replayed",
           unit="nats", kept=True),
    Column("replay_kl_free",
           "the same with the routers' own choice; well below replay_kl only if routes are misaligned",
           unit="nats", kept=True),
    Column("replay_kl_shifted",
           "the same with the sampler's routes shifted by one token, forwards or back, whichever gives less",
           unit="nats", kept=True),
    Column("expert_change_since_start", "expert-change rate against the cold start, on a fixed probe batch",
           share=True),
    Column("router_margin_over_spread",
           "(s_K − s_{K+1})/(s_1 − s_min(16, E)) of a router's sorted logits, mean over layers and tokens",
           share=True, kept=True),
    Column("load_entropy", "entropy of the experts' load over log E, mean over layers; 1 is even", share=True),
    Column("load_max_violation", "largest load times E, minus 1, worst layer; 0 is even"),
    Column("dead_experts", "share of experts that no response token of the rollout chose, mean over layers",
           share=True),
    Column("rollout_seconds", "sampling and scoring", unit="seconds", kept=True),
    Column("old_policy_seconds", "the old policy's forward", unit="seconds", kept=True),
    Column("probe_seconds", "forwards for expert_change_per_update and expert_change_since_start", unit="seconds"),
    Column("update_seconds",
           "forward, loss, backward, optimizer and metrics of all updates, without old_policy_seconds",
           unit="seconds", kept=True),
    Column("evaluation_seconds", "held-out accuracy; null in steps without an evaluation", unit="seconds"),
    Column("rollout_tokens_per_second", "sampled response tokens per second of sampling, dropped groups included",
           unit="tokens per second"),
    Column("update_tokens_per_second", "prompt and response tokens per second of update_seconds",
           unit="tokens per second"),
)
# Sums over a step.
COUNTS = (
    Column("response_tokens", "response tokens trained on", unit="tokens", type="int64"),
    Column("tokens_sampled", "sampled response tokens, including dropped groups",
           unit="tokens", type="int64", kept=True),
    Column("token_ratio_histogram",
           "counts of log π_θ/π_old over the step's updates: " + _LOG_RATIO_BINS, type=_COUNTS),
    Column("sequence_log_ratio_variance_histogram",
           "counts of Var_i = (1/T) Σ_t (log r_t − log s_i)², one per response and update: " + _VARIANCE_BINS,
           type=_COUNTS),
    Column("changed_slots_histogram",
           "counts of (layer, response token) over the step's updates by experts that differ from the old: 0 to K",
           type=_COUNTS),
    Column("rollout_changed_slots_histogram",
           "counts of (layer, response token) by experts that differ between sampling and training: 0 to K",
           type=_COUNTS),
)
# Each is otherwise as the column of that name above.
LAYER = (
    *(Column(name, "as in updates, for this layer") for name in (
        "expert_change_rate", "expert_set_change_rate", "top1_change_rate", "router_kl", "router_margin",
        "router_confidence", "expert_change_per_update",
    )),
    Column("load_entropy",
           "as in steps, for this layer: over the mini-batch's response tokens, or the rollout's for update 0"),
    Column("load_max_violation", "largest load times E, minus 1, for this layer and the tokens of load_entropy"),
    Column("dead_experts", "share of experts that no token of load_entropy chose"),
    *(Column(name, "as in steps, for this layer; update 0 only") for name in (
        "rollout_expert_disagreement", "rollout_set_disagreement", "rollout_top1_disagreement", "rollout_router_kl",
        "expert_change_since_start",
    )),
)
EVALUATION = (
    Column("step", "steps trained so far; 0 is the cold start", type="int64"),
    Column("prompt", "held-out prompt", type="string"),
    Column("score", "reward of the sampled response", share=True),
    Column("score_greedy", "reward of the greedy response; null if not sampled", share=True),
    Column("score_pass", "highest reward of evaluation.pass_k sampled responses; null if not sampled", share=True),
    Column("score_permuted", "score if every token runs the experts of another token", share=True),
)
# fmt: on


def tables() -> dict[str, dict[str, Column]]:
    """The columns of every table, by name, in their order on disk; the table of steps has the columns of UPDATE too."""
    of_updates = [replace(each, meaning=f"{each.meaning}; {each.over_updates} of the updates") for each in UPDATE]
    known = {each.name: each for each in (*UPDATE, *STEP)}
    of_layers = [replace(known.get(each.name, each), meaning=each.meaning) for each in LAYER]
    update = Column("update", "gradient update within the step, from 1", type="int64")
    layer_keys = (
        replace(update, meaning="gradient update from 1; 0 is the rollout before the first"),
        Column("layer", "MoE layer, from 0", type="int64"),
    )
    rows = {
        "steps": (_STEP_KEY, *STEP, *of_updates, *COUNTS),
        "updates": (_STEP_KEY, update, *UPDATE),
        "layers": (_STEP_KEY, *layer_keys, *of_layers),
        "evaluations": EVALUATION,
    }
    return {table: {each.name: each for each in columns} for table, columns in rows.items()}


TABLES = tables()


def names(*wanted: str) -> tuple[str, ...]:
    """Return the names of columns. Raises KeyError for one that no table has: at the import of a module that names it.

    A module names at its top what it reads or writes: ``REWARD, ESS = names("reward", "ess")``.
    """
    if unknown := [name for name in wanted if not any(name in table for table in TABLES.values())]:
        raise KeyError(f"no table has the columns {unknown}")
    return wanted


# What a run is judged by: each is taken at the last evaluation.
OUTCOMES = names("eval_accuracy", "eval_greedy", "eval_pass")
# Column of steps → the scores that it is the mean of.
EVALUATED = {
    "eval_accuracy": "score",
    "eval_greedy": "score_greedy",
    "eval_pass": "score_pass",
    "eval_accuracy_permuted": "score_permuted",
}
# ``statistics`` imports no columns.
names(*EVALUATED, *EVALUATED.values(), *FINITE)
# Tables with columns that no line here declares: those of the numbers of a loss, ``loss/…``.
OWN_TABLES = ("steps", "updates")
# The most such columns of a run, and the longest name of one.
MAX_OWN, _LONGEST_NAME = 64, 40


def of_metric(metric: str) -> Column:
    """The column of a metric: of the first table that has it. A plain column for a name that no table has."""
    found = (columns[metric] for columns in TABLES.values() if metric in columns)
    return next(found, Column(metric, ""))


def is_own(name: str) -> bool:
    """Return whether a name is that of a number of a loss."""
    prefix, _, rest = name.partition("/")
    return prefix == "loss" and rest.isascii() and rest.isidentifier() and len(rest) <= _LONGEST_NAME


def bounds(metric: str) -> tuple[float, float] | None:
    """The ends of what a metric can be, where it has both; also of a run's last, best, median or mean value of it."""
    return (0.0, 1.0) if of_metric(metric).share else None


def label(metric: str) -> str:
    """What an axis calls a metric."""
    return of_metric(metric).label or metric


def short(metric: str) -> str:
    """What the header of a table calls a metric."""
    return of_metric(metric).short or label(metric)


def kept() -> frozenset[str]:
    """The metrics of steps that archives keep."""
    return frozenset(name for name, column in TABLES["steps"].items() if column.kept)
