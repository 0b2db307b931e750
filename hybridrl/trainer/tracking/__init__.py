"""Output of a run: console, metrics, trackers, rollouts, provenance.

records.py, progress.py: the observers that write and print; start reading there.
tracker.py, sinks.py and tensorboard.py: metrics.jsonl, W&B, MLflow, TensorBoard.
console.py, header.py, summary.py: texts on the terminal.
provenance.py (manifest.json), rollout_log.py, best_effort_files.py: files of a run.
"""
