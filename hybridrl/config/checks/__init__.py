"""Checks of a composed config, by topic; each returns problems."""
