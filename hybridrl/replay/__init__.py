"""Replay of an update that was not finite. Start with session.py."""
