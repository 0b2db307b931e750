"""vLLM inside this process: the engine, and the private names of vLLM that it uses."""
