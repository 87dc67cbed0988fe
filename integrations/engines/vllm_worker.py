"""Sample responses with vLLM on a CPU, in its own environment, and write tokens, log-probabilities and routes.

    python integrations/engines/vllm_worker.py FOLDER

Reads ``model/`` and ``asked.json`` in the folder, and writes ``sampled.safetensors``, which ``against_vllm.as_rollout``
reads. vLLM returns the experts of its tokens on a GPU alone; here its routers tell this program what they choose, which
needs eager mode, a scheduler in step with the model, and no shared prefixes.
"""

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
os.environ |= {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_USE_V2_MODEL_RUNNER": "0"}

import torch
from safetensors.torch import save_file
from vllm import LLM, SamplingParams


class Recorder:
    """The experts of every position that a model runner feeds, by request."""

    def __init__(self, runner: Any) -> None:
        self._runner, self._prepare = runner, runner._prepare_inputs
        self._chosen: dict[tuple[str, int], list[list[int]]] = {}
        self._fed: list[tuple[str, int]] = []
        runner._prepare_inputs = self._remember
        layers = [module for module in runner.model.modules() if hasattr(module, "router")]
        routers = {id(module.router): module.router for module in layers if hasattr(module.router, "set_capture_fn")}
        for layer, router in enumerate(routers.values()):
            router.set_capture_fn(partial(self._capture, layer))

    def _remember(self, scheduled: Any, *more: Any) -> Any:
        prepared, runner = self._prepare(scheduled, *more), self._runner
        n = scheduled.total_num_scheduled_tokens
        requests = [runner.input_batch.req_ids[row] for row in runner.req_indices.np[:n].tolist()]
        self._fed = list(zip(requests, runner.positions[:n].tolist(), strict=True))
        return prepared

    def _capture(self, layer: int, experts_NK: torch.Tensor) -> None:
        for key, experts in zip(self._fed, experts_NK[: len(self._fed)].tolist(), strict=True):
            chosen = self._chosen.setdefault(key, [])
            assert len(chosen) == layer, f"layer {layer} of {key} after {len(chosen)} others"
            chosen.append(experts)

    def by_request(self) -> dict[str, torch.Tensor]:
        """Return the experts of each request, (positions, L, K), by vLLM's own name of the request."""
        grouped: dict[str, dict[int, list[list[int]]]] = {}
        for (request, position), chosen in self._chosen.items():
            grouped.setdefault(request, {})[position] = chosen
        return {
            request: torch.tensor([of_positions[position] for position in range(len(of_positions))])
            for request, of_positions in grouped.items()
        }


def main(folder: Path) -> None:
    """Sample the responses that ``asked.json`` asks for."""
    asked = json.loads((folder / "asked.json").read_text())
    llm = LLM(
        str(folder / "model"),
        dtype=asked["precision"],
        kv_cache_dtype=asked["cache"],
        seed=0,
        skip_tokenizer_init=True,
        enforce_eager=True,
        enable_prefix_caching=False,
        async_scheduling=False,
        max_model_len=512,
        disable_log_stats=True,
    )
    routes = Recorder(llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner)
    params = SamplingParams(
        temperature=1.0,
        max_tokens=asked["max_new_tokens"],
        stop_token_ids=[asked["end"]],
        logprobs=0,
        detokenize=False,
    )
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in asked["prompts"]], params, use_tqdm=False)
    by_request = {name.partition("-")[0]: chosen for name, chosen in routes.by_request().items()}
    tokens, logprobs, chosen = [], [], []
    for ids, output in zip(asked["prompts"], outputs, strict=True):
        (response,) = output.outputs
        tokens.append(torch.tensor(list(response.token_ids)))
        drawn = zip(response.token_ids, response.logprobs, strict=True)
        logprobs.append(torch.tensor([by_token[token].logprob for token, by_token in drawn]))
        chosen.append(by_request[output.request_id][: len(ids) + len(tokens[-1]) - 1])
    tensors = {
        "lengths_B": torch.tensor([len(each) for each in tokens]),
        "tokens_N": torch.cat(tokens),
        "logprobs_N": torch.cat(logprobs),
        "routes_NLK": torch.cat(chosen),
    }
    save_file(tensors, folder / "sampled.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
