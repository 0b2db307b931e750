"""Commands besides training: export, eval and replay. Start with running.py, which they share."""
