"""Is the present code slower than when its results were stored?

Reads a benchmark's lines and compares each with the last stored one (benchmarks/results/) of the
same device, versions and settings. Prints each judged number; exits with 1 if one is worse by more
than --tolerance, with 2 if for no line a comparable one is stored. Hosts with the same GPU differ
by up to a factor of two in what their CPU does: compare on the host of the stored line, or see
RESULTS.md. Seconds of the start are not judged, as the first start on a machine compiles.

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
    "step_s",
    "sync_ms.sum",
    "sync_ms",
    "sync_verified_ms",
)
# Settings that select numbers or say how often each is measured: lines may differ in these.
SELECTION = ("lengths", "repeats", "steps_timed", "variants")
# Settings that older lines do not have, by their benchmarks' only choice then.
OLDER = {"reshard": {"weights": "dtype"}, "rollout": {"weights": "dtype"}}


def judged(measured: dict[str, Any], path: str = "") -> Iterator[tuple[str, float]]:
    """Yield the path and value of each judged number."""
    for name, value in measured.items():
        if isinstance(value, dict):
            yield from judged(value, f"{path}{name}.")
        elif value is not None and (path + name).endswith(HIGHER_IS_BETTER + LOWER_IS_BETTER):
            yield path + name, value[1] if isinstance(value, list) else value


def comparable(line: dict[str, Any]) -> dict[str, Any] | None:
    """Return the last stored line with the same device, versions and settings, and a number."""
    found, names = None, {name for name, _ in judged(line["measured"])}
    file = STORED / f"{line['bench']}.jsonl"
    for text in file.read_text().splitlines() if file.exists() else []:
        stored = json.loads(text)
        has_name = any(name in names for name, _ in judged(stored["measured"]))
        # Older lines name fewer packages.
        has_versions = stored["versions"].items() <= line["versions"].items()
        if "system" not in stored and has_name and has_versions and same_settings(stored, line):
            found = stored
    return found


def same_settings(stored: dict[str, Any], line: dict[str, Any]) -> bool:
    """Return whether two lines have the same device and settings."""
    older = OLDER.get(line["bench"], {})
    both = [
        older | {name: value for name, value in one["settings"].items() if name not in SELECTION}
        for one in (stored, line)
    ]
    return both[0] == both[1] and stored["device"] == line["device"]


def worse_by(name: str, before: float, now: float) -> float:
    """Return the share by which a number got worse; negative if it got better."""
    change = (now - before) / before if before else float(now != before)
    return -change if name.endswith(HIGHER_IS_BETTER) else change


def compare(line: dict[str, Any], stored: dict[str, Any], tolerance: float) -> bool:
    """Print the judged numbers of both lines; return whether one is worse."""
    now, worse = dict(judged(line["measured"])), False
    for name, before in judged(stored["measured"]):
        if name not in now:
            continue
        by = worse_by(name, before, now[name])
        worse |= by > tolerance
        verdict = "worse" if by > tolerance else "better" if -by > tolerance else "same"
        print(f"{name:44} {before:>12g} {now[name]:>12g}  {verdict}, {abs(by):.1%}")
    return worse


def main() -> None:
    """Compare; exit with 1 if a number is worse."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("lines", type=Path, help="what a benchmark has printed")
    parser.add_argument("--tolerance", type=float, default=0.05, help="share; default: 0.05")
    args = parser.parse_args()
    texts = args.lines.read_text().splitlines() if args.lines.is_file() else []
    lines = [json.loads(text) for text in texts if text.startswith('{"bench":')]
    if not lines:
        parser.error(f"{args.lines} has no line of a benchmark")
    results = []
    for line in lines:
        stored = comparable(line)
        if stored is None:
            common = {key: line[key] for key in ("device", "versions", "settings")}
            print(f"benchmarks/results/{line['bench']}.jsonl has no line of this device, of these")
            print(f"versions and settings: {common}")
        else:
            results.append(compare(line, stored, args.tolerance))
    raise SystemExit(int(any(results)) if results else 2)


if __name__ == "__main__":
    main()
