"""Is the present code slower than when its results were stored?

Reads a benchmark's line and compares it with the last stored one (benchmarks/results/) of the same
device, versions and settings. Prints each judged number; exits with 1 if one is worse by more than
--tolerance, with 2 if nothing comparable is stored. Hosts with the same GPU differ by up to a
factor of two in what their CPU does: compare on the host of the stored line, or see RESULTS.md.

Run        python benchmarks/training.py > now.json; python benchmarks/compare.py now.json
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

STORED = Path(__file__).parent / "results"
# Judged numbers, by the end of their path; of [smallest, median, largest] the median counts.
HIGHER_IS_BETTER = (
    "agents_to_batch",
    "log_probs_mfu",
    "update_mfu",
    "unequal_over_equal",
    "tokens_per_second.worker",
    "trained_tokens_per_s",
    "rollout_tokens_per_second",
    "offload_gb_per_s_min_median_max",
    "onload_gb_per_s_min_median_max",
    "write_gb_per_s",
)
LOWER_IS_BETTER = (
    "allocated",
    "ms_min_median_max.all",
    "blocked_s_first",
    "extra_memory_buckets",
    "from_last_update",
    "setup_s",
    "step_s",
    "sync_ms.sum",
    "sync_ms",
    "sync_verified_ms",
)
IDENTITY = ("bench", "device", "versions", "settings")
# Settings that select numbers or say how often each is measured: lines may differ in these.
SELECTION = ("lengths", "repeats", "steps_timed", "variants")


def judged(measured: dict[str, Any], path: str = "") -> Iterator[tuple[str, float]]:
    """Yield the path and value of each judged number."""
    for name, value in measured.items():
        if isinstance(value, dict):
            yield from judged(value, f"{path}{name}.")
        elif (path + name).endswith(HIGHER_IS_BETTER + LOWER_IS_BETTER):
            yield path + name, value[1] if isinstance(value, list) else value


def comparable(line: dict[str, Any]) -> dict[str, Any] | None:
    """Return the last stored line with the same device, versions and settings, and a number."""
    found, names = None, {name for name, _ in judged(line["measured"])}
    for text in (STORED / f"{line['bench']}.jsonl").read_text().splitlines():
        stored = json.loads(text)
        has_name = any(name in names for name, _ in judged(stored["measured"]))
        if "system" not in stored and has_name and identity(stored) == identity(line):
            found = stored
    return found


def identity(line: dict[str, Any]) -> dict[str, Any]:
    """Return what two lines must have in common."""
    settings = {name: one for name, one in line["settings"].items() if name not in SELECTION}
    return {key: line[key] for key in IDENTITY} | {"settings": settings}


def worse_by(name: str, before: float, now: float) -> float:
    """Return the share by which a number got worse; negative if it got better."""
    change = (now - before) / before if before else float(now != before)
    return -change if name.endswith(HIGHER_IS_BETTER) else change


def main() -> None:
    """Compare; exit with 1 if a number is worse."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("line", type=Path, help="file whose last line a benchmark has printed")
    parser.add_argument("--tolerance", type=float, default=0.05, help="share; default: 0.05")
    args = parser.parse_args()
    line = json.loads(args.line.read_text().splitlines()[-1])
    stored = comparable(line)
    if stored is None:
        print(f"benchmarks/results/{line['bench']}.jsonl has no line of this device, of these")
        print(f"versions and settings: {json.dumps(identity(line))}")
        raise SystemExit(2)
    now, worse = dict(judged(line["measured"])), 0
    for name, before in judged(stored["measured"]):
        if name not in now:
            continue
        by = worse_by(name, before, now[name])
        worse += by > args.tolerance
        verdict = "worse" if by > args.tolerance else "better" if -by > args.tolerance else "same"
        print(f"{name:44} {before:>12g} {now[name]:>12g}  {verdict}, {abs(by):.1%}")
    raise SystemExit(bool(worse))


if __name__ == "__main__":
    main()
