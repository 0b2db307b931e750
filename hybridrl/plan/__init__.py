"""Plan of a run as text: of a dry run (dry_run.py), and of `hybridrl plan` (verdict.py)."""
