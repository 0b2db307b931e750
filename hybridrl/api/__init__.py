"""The interface from Python; `hybridrl` exports its names. Start with run.py."""
