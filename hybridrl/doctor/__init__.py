"""Staged checks of a cluster before a run: what would hang or slow it is named, with evidence."""
