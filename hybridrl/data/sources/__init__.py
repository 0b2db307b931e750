"""Prompts from files and hubs: reading, filtering, mixing, ordering."""
