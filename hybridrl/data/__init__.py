"""Problems, prompts, the ragged batch and its schedule."""
