"""Metrics and what the user sees of them: console, files, trackers."""
