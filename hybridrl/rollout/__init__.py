"""Generation. The only folder that imports vllm."""
