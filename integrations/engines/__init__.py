"""The simulated engines next to vLLM."""
