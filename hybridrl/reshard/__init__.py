"""Moving FSDP shards into vLLM's tensor-parallel layout, in place: layout, plan, engine."""
