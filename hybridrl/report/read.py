"""Recorded files of a run as plain data for the page, thinned to a budget of characters.

Every file may be missing, cut off by a kill, or still growing. docs/records.md names the fields.
"""

import math
import re
from base64 import b64encode
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import accumulate, takewhile
from pathlib import Path
from typing import Any
from zlib import crc32

from hybridrl.trainer.tracking.tracker import METRICS_FILE, TIMELINE_FILE, read_metrics

# Steps of the curves, and characters of one; longer runs show every n-th, and all evaluations.
MIN_POINTS, MAX_POINTS, POINT_CHARACTERS = 100, 2000, 3000
# Characters of a text, and tokens of a response.
MAX_TEXT, MAX_TOKENS = 12_000, 4_000
# Responses of a file that are always kept.
MIN_RESPONSES = 2
# A token with all its numbers.
TOKEN_CHARACTERS = 90
# Shares of the budget.
RESPONSES, TOKENS, TIMELINE = 0.55, 0.35, 0.1
# Images are not compressed further: a smaller share, in addition.
IMAGES = 0.2
KINDS = ("training", "sampled", "greedy")
# Columns of tokens/*.parquet that are no numbers of a token.
TOKEN_KEYS = ("response", "position", "token_id", "token")
# Fields of a prompt.
PROMPT = ("prompt", "question", "answer")

Data = dict[str, Any]


def read_run(folder: Path, budget: int) -> Data:
    """Read the records of a run for `thinned`, at most about `budget` characters of JSON.

    Returns:
        rows: of metrics.jsonl, of which a page shows `points`.
        responses: a list of each file, those to keep first. timeline: per step.
        tokens: per response its tokens, ids and a list for each quantity.
        experts: the last file of experts/, step and shares by layer; null without one.
        found: numbers of responses, tokens and timeline on disk. notes: what cannot be read.
    """
    on_disk, notes = Counter[str](), list[str]()
    tokens = _tokens(folder, budget * TOKENS, on_disk, notes)
    steps = [step for step in read_metrics(folder / TIMELINE_FILE) if "sections" in step]
    responses = _responses(folder, budget * RESPONSES, tokens, on_disk)
    on_disk["timeline"], size = len(steps), sum(len(str(step)) for step in steps)
    return {
        "rows": read_metrics(folder / METRICS_FILE),
        "points": min(MAX_POINTS, budget // POINT_CHARACTERS),
        "responses": responses,
        "tokens": tokens,
        "experts": _experts(folder),
        "images": _images(folder, responses, budget * IMAGES),
        "timeline": _evenly(steps, budget * TIMELINE / max(size, 1)),
        "found": on_disk,
        "notes": notes,
    }


def thinned(run: Data, share: float) -> Data:
    """Return a share, in (0, 1], of each kind of a run's records, as the page shows them.

    `series` has metrics as {name: values}, with `step` and `wall` (seconds in steps so far).
    Responses have indices of `prompts`, and these names of `images`. `notes` are sentences about
    what was left out.
    """
    notes = [*run["notes"]]
    curves = series(run["rows"], max(MIN_POINTS, int(run["points"] * share)), notes)
    prompts: dict[Any, int] = {}
    responses = [
        record | {"prompt": prompts.setdefault(record["prompt"], len(prompts))}
        for of_file in run["responses"]
        for record in of_file[: max(MIN_RESPONSES, int(len(of_file) * share))]
    ]
    kept = {
        "responses": sorted(responses, key=lambda one: (one["step"], KINDS.index(one["kind"]))),
        "tokens": _evenly(run["tokens"], share),
        "timeline": _evenly(run["timeline"], share),
    }
    for name, records in kept.items():
        if len(records) < run["found"][name]:
            every = f"{run['found'][name]:,}; the folder has all of them"
            notes.append(f"{name.capitalize()}: {len(records):,} of {every}.")
    texts = [dict(zip((*PROMPT, "images"), prompt, strict=True)) for prompt in prompts]
    images = {name: run["images"][name] for text in texts for name in text["images"]}
    whole = {"prompts": texts, "images": images, "experts": run["experts"]}
    return {"series": curves, **whole, **kept, "notes": notes}


def _evenly(items: Sequence[Data], share: float) -> list[Data]:
    """Return a share of the items, spread evenly, and at least one."""
    count = min(len(items), max(1, int(len(items) * share)))
    return [items[index * len(items) // count] for index in range(count)]


def series(
    rows: Sequence[Mapping[str, Any]], points: int, notes: list[str]
) -> dict[str, list[Any]]:
    """Turn rows of metrics into one list for each metric; None where a step has no number."""
    wall, known = 0.0, []
    for row in rows:
        wall += row.get("time/step_s") or 0.0
        known.append({**row, "wall": wall})
    every = math.ceil(len(known) / points)
    if every > 1:
        notes.append(f"Curves: every {every}th step, and all steps with an evaluation.")
        known = [
            row
            for index, row in enumerate(known)
            if index % every == 0 or row.get("eval/accuracy") is not None or row is known[-1]
        ]
    names = dict.fromkeys(name for row in known for name in row)
    return {name: [number(row.get(name)) for row in known] for name in names}


def number(value: Any) -> Any:
    """Round a number to six digits; None if it is not finite or no number."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.6g}")


def _responses(
    folder: Path, budget: float, tokens: Sequence[Data], on_disk: Counter[str]
) -> list[list[Data]]:
    """Read rollouts/: of each file about the same number of characters, whole prompts first.

    Responses with recorded tokens come first, then prompts in an order that is the same in all
    files. So a prompt that comes again is kept again.
    """
    with_tokens = {("training", one["step"], one["response"]) for one in tokens}

    def order(record: Data) -> Any:
        has_tokens = (record["kind"], record["step"], record["k"]) in with_tokens
        return not has_tokens, crc32(str(record.get("prompt_id")).encode()), record["k"]

    files = _numbered(folder / "rollouts", r"(?:eval_)?step_(\d+)\.jsonl")
    kept = []
    for step, path in files:
        kind = "sampled" if path.name.startswith("eval") else "training"
        records = [
            {"kind": kind, **record, "step": step, "k": k}
            for k, record in enumerate(read_metrics(path))
        ]
        on_disk["responses"] += len(records)
        records.sort(key=order)
        sizes = accumulate(min(len(str(record)), 2 * MAX_TEXT) for record in records)
        fitting = [*takewhile(lambda size: size <= budget / len(files), sizes)]
        kept.append([*map(_response, records[: max(MIN_RESPONSES, len(fitting))])])
    return kept


def _response(record: Mapping[str, Any]) -> Data:
    same = ("step", "k", "kind", "truncated", "failure", "weight_version")
    parts, turns = record.get("parts"), record.get("turns")
    return {
        **{name: record.get(name) for name in same},
        "prompt": (*(clip(record.get(name)) for name in PROMPT), (*record.get("images", ()),)),
        "text": clip(record.get("response")),
        "score": number(record.get("score")),
        "length": number(record.get("length")),
        "parts": {name: number(part) for name, part in parts.items()} if parts else {},
        "turns": [{"role": turn["role"], "text": clip(turn["text"])} for turn in turns or []],
    }


def clip(value: Any) -> str:
    """Cut the middle out of a long text, and say how much."""
    text = "" if value is None else str(value)
    left_out = len(text) - MAX_TEXT
    if left_out <= 0:
        return text
    half = MAX_TEXT // 2
    return f"{text[:half]}\n[... {left_out:,} characters left out ...]\n{text[-half:]}"


def _tokens(folder: Path, budget: float, on_disk: Counter[str], notes: list[str]) -> list[Data]:
    """Read tokens/: responses spread evenly over the recorded ones, if not all of them fit."""
    files = _numbered(folder / "tokens", r"step_(\d+)\.parquet")
    if not files:
        return []
    import pyarrow
    from pyarrow import parquet

    kept: list[Data] = []
    used = 0
    for done, (step, path) in enumerate(files, start=1):
        try:
            columns = parquet.read_table(path).to_pydict()
        except (OSError, pyarrow.ArrowException) as error:
            notes.append(f"{path.name} cannot be read: {error}")
            continue
        start = 0
        for response, count in Counter(columns["response"]).items():
            on_disk["tokens"] += 1
            size = min(count, MAX_TOKENS) * TOKEN_CHARACTERS
            if used + size <= budget * done / len(files) or not kept:
                used += size
                own = {name: column[start : start + count] for name, column in columns.items()}
                kept.append({"step": step, "response": response, **_token_columns(own)})
            start += count
    return kept


def _experts(folder: Path) -> Data | None:
    """Read the newest file of experts/."""
    files = _numbered(folder / "experts", r"step_(\d+)\.jsonl")
    if not files:
        return None
    step, path = files[-1]
    return {"step": step, "shares": [row["shares"] for row in read_metrics(path)]}


def _images(folder: Path, responses: Sequence[Sequence[Data]], budget: float) -> dict[str, str]:
    """Read images/ of responses as data: URLs by name, until they have `budget` characters."""
    kept, used = defaultdict[str, str](str), 0
    for name in dict.fromkeys(n for of_file in responses for r in of_file for n in r["prompt"][-1]):
        path = folder / "images" / Path(str(name)).name
        if path.is_file() and used < budget:
            kept[name] = f"data:image/jpeg;base64,{b64encode(path.read_bytes()).decode()}"
            used += len(kept[name])
    return kept


def _token_columns(columns: dict[str, list[Any]]) -> Data:
    """Round and cut the columns of a response; those without any value are left out."""
    numbers = {
        name: [number(value) for value in column[:MAX_TOKENS]]
        for name, column in columns.items()
        if name not in TOKEN_KEYS and any(value is not None for value in column)
    }
    texts = {name: columns[name][:MAX_TOKENS] for name in ("token", "token_id")}
    return {"length": len(columns["token"]), **texts, **numbers}


def _numbered(folder: Path, pattern: str) -> list[tuple[int, Path]]:
    """List the files whose whole name matches, by the number in it."""
    names = [(re.fullmatch(pattern, path.name), path) for path in folder.glob("*")]
    return sorted((int(match[1]), path) for match, path in names if match)
