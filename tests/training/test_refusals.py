"""Overrides that no run can have: each is refused in one line, before anything is made."""

import pytest

from steadymoe.bench.runs import compose
from steadymoe.bench.schema import ConfigError

REFUSED = {
    # Engines.
    "engine=bf16 engine.strength=1.5": "from 0 to 1 here",
    "engine=router_noise engine.strength=-1": "from 0 to 1e+12",
    "optimizer.learning_rate=1e13": "less than or equal to",
    "engine=stale engine.strength=1.5": "whole number of steps",
    "engine=exact engine.strength=1.0": "has no strength",
    "engine=fp8 engine.dtype=fp4": "engine.dtype",
    "engine=fp8 engine.scale=group": "channel, tensor",
    "engine=bf16 engine.scale=tensor": "bf16 has no scale to choose",
    "engine=truncated engine.top_p=0": "top_p must be above 0 and at most 1; got 0",
    "engine=truncated engine.top_p=half": "top_p must be a number",
    "engine=truncated engine.top_k=-1": "top_k must be at least 0",
    "engine=truncated engine.min_p=1.0": "min_p must be at least 0 and below 1",
    "engine=truncated engine.strength=0.5": "strength of truncated must be 1, or 0 to keep every token",
    "engine=truncated engine.top_p=1": "keeps every token",
    "engine=truncated engine.top_k=16": "top_k=16 keeps all 13 tokens",
    "engine=truncated engine.strength=0 engine.replay_mask=true": "without truncation there is no mask",
    "engine=bf16 +engine.replay_mask=true": "Rounding has no 'replay_mask'",
    "engine=exact engine._target_=steadymoe.algorithms.grpo.GRPO": "engine._target_",
    "engine=truncated algorithm=trm": "reads the sampler's most likely tokens",
    # Routing and the dials of routers.
    "model=dense_tiny routing=r2": "has no routers",
    "routing=off routing.replay=r2": "because the routing fixes it; choose another routing",
    "routing=pr2 updates_per_rollout=1": "learns from a rollout's second update on",
    "routing=pr2 routing.predictor_learning_rate=0": "routing.predictor_learning_rate` must be greater than 0",
    "routing=lagged routing.lag=null": "routing.lag must be set with routing=lagged",
    "routing=lagged updates=16 routing.lag=16": "routing.lag=16: in a run of 16 updates no weights are that old",
    "routing=off +routing.lag_trigger=3.0": "routing.lag_trigger requires routing=lagged",
    "model=dense_micro optimizer.router_factor=5": "dense and has no routers or experts: optimizer.router_factor",
    "model=dense_micro optimizer.expert_factor=2": "dense and has no routers or experts: optimizer.expert_factor",
    "model=micro +model.config.router_scale=0": "router_scale must be a number above 0; got 0",
    "routing=freeze optimizer.router_factor=5": "routing=freeze keeps routers",
    # Numbers of a family.
    "model=mixtral_micro +model.config.router_dtype=fp8": "must be float32 or bfloat16; got 'fp8'",
    "model=dense_micro +model.config.router_dtype=float32": "router_dtype is for routers",
    "model=deepseek_v3_micro model.config.n_group=3": "n_group=3",
    "model=deepseek_v3_micro model.config.n_shared_experts=-1": "n_shared_experts must be between 0 and",
    "model=gpt_oss_micro model.config.num_experts_per_tok=9": "num_experts_per_tok=9",
    # Updates.
    "microbatch=4 routing.aux_loss=0.1": "need the whole mini-batch",
    "advantage=leave_one_out_std rollout.responses=2": "at least 3 responses",
    "correction=tis algorithm=grpo algorithm.loss.anchor=rollout": "use correction=none",
    # Dynamic sampling where it would drop what is learned from.
    "algorithm=reinforce_pp algorithm.sampling.max_rollouts=3": "above 1 drops groups",
    "algorithm=grpo algorithm.entropy_bonus=0.1 algorithm.sampling.max_rollouts=3": "above 1 drops groups",
    "algorithm=dapo algorithm.kl.coefficient=0.1 algorithm.sampling.max_rollouts=3": "above 1 drops groups",
    # Savings and measurements.
    "savings.reuse_sampler_logprobs=5 engine=bf16": "a sampler equal to the trainer",
    "savings.reuse_sampler_logprobs=5 engine=truncated": "a sampler equal to the trainer",
    "savings.reuse_sampler_logprobs=5 precision=bf16": "a sampler equal to the trainer",
    "savings.reuse_sampler_logprobs=5 routing=lagged": "a sampler equal to the trainer",
}


@pytest.mark.parametrize("words", REFUSED)
def test_impossible_run_is_refused_in_one_line(words: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        compose.plan(words.split())
    assert REFUSED[words] in str(refusal.value)
    assert "\n" not in str(refusal.value)
    if words.endswith("max_rollouts=3"):
        compose.plan(words.replace("max_rollouts=3", "max_rollouts=1").split())
