"""hybridrl: HybridFlow reinforcement learning for language models on FSDP2, Ray and vLLM."""
