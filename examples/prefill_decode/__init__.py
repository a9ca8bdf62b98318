"""One process computes prompts, others decode from its KV."""
