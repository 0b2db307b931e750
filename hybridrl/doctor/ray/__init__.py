"""Checks of Ray on every node."""
