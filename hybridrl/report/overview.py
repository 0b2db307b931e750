"""Overview of a run: facts, results, settings and warnings, as texts."""

import json
import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hybridrl.app.compose import conf_dir
from hybridrl.app.runs import RESULT_FILE, STATES, RunOnDisk, accuracy_text, state_of
from hybridrl.config.command.command_line import DIRECTORIES
from hybridrl.config.command.provenance import Source, provenance_of, recipe_files
from hybridrl.config.errors import shown
from hybridrl.config.keys import leaves
from hybridrl.config.planner.machine import GPU, Machine, Node
from hybridrl.data.sources.problem_sets import left_out_text
from hybridrl.data.sources.prompts import DataSetSummary
from hybridrl.health.findings import HEALTH_FILE
from hybridrl.trainer.tracking.provenance import MANIFEST_FILE
from hybridrl.trainer.tracking.summary import accuracy_changes, duration_text, first_evaluated
from hybridrl.trainer.tracking.tracker import read_metrics

LOG_FILE = "main.log"
# Lines of its end that are shown, and bytes that are read for them.
LOG_LINES, LOG_BYTES = 60, 20_000
# Programs that train.
TRAIN = ("main.py", "cli.py", "hybridrl")
# Chosen by the program for the machine.
NOT_TYPED = ("hardware", "hardware.reason")
# A path in quotes that Hydra does not need.
_PATH = re.compile(r"'([\w.:@%+-]*/[\w./:@%+-]*)'")


def overview(folder: Path, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Describe a run with the rows of its metrics.jsonl; what is not known is left out.

    Returns:
        name, state, folder: of the run. facts: [(label, text)]. accuracies: [(name, before, after,
        change)]; first: title of before. settings: [(key, value, source)], those that are not
        defaults. config: [(key, value)], all. findings: [(check, when, evidence, remedy)], of
        health checks. log: the last lines of main.log. result: numbers for the table of runs.
    """
    manifest, result = _json(folder / MANIFEST_FILE), _json(folder / RESULT_FILE)
    seconds = sum(row.get("time/step_s") or 0.0 for row in rows)
    steps = max((int(row.get("step") or 0) for row in rows), default=0)
    last = {name: value for row in rows for name, value in row.items() if value is not None}
    scored = [row for row in rows if row.get("eval/accuracy") is not None]
    accuracy = accuracy_text(last.get("eval/accuracy"), last.get("eval/ci95"))
    config = manifest.get("config", {})
    ended = STATES.get(str(result.get("status")), "unknown")
    state = state_of(RunOnDisk(folder, manifest)) if manifest else ended
    total = config.get("trainer", {}).get("total_steps")
    times = [f"{duration_text(seconds)} in steps"]
    if "seconds" in result:
        last_start = duration_text(result["seconds"])
        resumed = manifest.get("earlier_starts")
        times.append(f"last start {last_start}" if resumed else f"{last_start} from start to end")
    facts = [
        ("state", f"{state}, {steps} of {total or '?'} steps"),
        ("reason", str(result.get("error") or "")),
        ("time", ", ".join(times)),
        ("accuracy", f"{accuracy}, held out, sampled, step {scored[-1]['step']}" if scored else ""),
        *_manifest_facts(manifest),
        ("folder", str(folder.resolve())),
    ]
    return {
        "name": str(manifest.get("run", folder.name)),
        "state": state,
        "folder": str(folder),
        "facts": [(label, text) for label, text in facts if text],
        "first": first_evaluated(rows),
        "accuracies": [
            (name, accuracy_text(*before), accuracy_text(*after), _change(after[0] - before[0]))
            for name, before, after in accuracy_changes(rows)
        ],
        "settings": settings(manifest or result),
        "config": [(key, shown(value)) for key, value in sorted(leaves(config).items())],
        "findings": findings(folder, rows),
        "log": end_of_log(folder / LOG_FILE),
        "result": {
            "accuracy": last.get("eval/accuracy"),
            "+-": last.get("eval/ci95"),
            "reward": last.get("reward/mean"),
            "KL": last.get("actor/kl"),
            "steps": steps,
            "minutes": round(seconds / 60, 1),
        },
    }


def _change(value: float) -> str:
    return f"{value:+.3f}" if abs(value) >= 5e-4 else "0"


def _manifest_facts(manifest: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Describe model, data, machine, software and starts of a run."""
    if not manifest:
        return [("manifest", f"{MANIFEST_FILE} is missing or damaged")]
    config, git = manifest.get("config", {}), manifest.get("git")
    model, algorithm = config.get("model", {}), config.get("algorithm", {})
    weights = ", random weights" if model.get("init") == "random" else ""
    adapters = f", LoRA of rank {config['lora'].get('rank')}" if config.get("lora") else ""
    loss = algorithm.get("loss", {}).get("function")
    versions = manifest.get("versions", {})
    earlier = [start.get("started", "?") for start in manifest.get("earlier_starts", [])]
    return [
        ("started", str(manifest.get("started", ""))),
        ("earlier starts", ", ".join(earlier)),
        ("resumed from", str(manifest.get("resumed_from") or "")),
        ("model", f"{model.get('path')}{weights}{adapters}"),
        *[("data", _data(DataSetSummary(**facts))) for facts in manifest.get("data", [])],
        ("method", f"{algorithm.get('advantage')} advantages, {loss}"),
        ("hardware", _machine(manifest.get("hardware", {}))),
        ("versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
        ("git commit", git["commit"] + (", with changes" if git["dirty"] else "") if git else ""),
        ("platform", str(manifest.get("platform", ""))),
        ("command", _command(manifest.get("argv", []))),
    ]


def _command(argv: Sequence[str]) -> str:
    """Return the command that was typed, paths without quotes of Hydra's.

    `hybridrl train` leaves its second word out of sys.argv. It adds the hardware, if it chose that,
    and last the folder.
    """
    program, words = "".join(argv[:1]), [_PATH.sub(r"\1", word) for word in argv[1:]]
    if Path(program).name not in TRAIN:
        return f"{program} {shlex.join(words)}".strip()
    keys = [word.partition("=")[0] for word in words]
    added = {keys.index(key) for key in NOT_TYPED if NOT_TYPED[-1] in keys}
    added.update([place for place, key in enumerate(keys) if key in DIRECTORIES][-1:])
    typed = [word for place, word in enumerate(words) if place not in added]
    return f"hybridrl train {shlex.join(typed)}"


def _data(facts: DataSetSummary) -> str:
    left_out = left_out_text(facts.left_out)
    return facts.describe() + (f"; left out: {left_out}" if left_out else "")


def _machine(facts: Mapping[str, Any]) -> str:
    nodes = facts.get("nodes", [])
    known = [Node(**{**node, "gpus": tuple(GPU(**gpu) for gpu in node["gpus"])}) for node in nodes]
    return Machine(tuple(known)).describe() if known else ""


def settings(manifest: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """List settings and groups chosen on the command line or in the recipe, with their values."""
    flat = leaves(manifest.get("config", {}))
    typed = [str(text) for text in manifest.get("overrides", [])]
    values = {text.partition("=")[0].lstrip("+~"): text.partition("=")[2] for text in typed}
    recipe = values.get("recipe", "").strip("[]")
    folders = [str(conf_dir()), *manifest.get("config_dirs", [])]
    sources = [SimpleNamespace(schema="file", path=path) for path in folders]
    recipes = recipe_files({"recipe": recipe.split(",") if recipe else []}, sources)
    groups = {  # of items such as {"override /algorithm": "grpo"}
        key.removeprefix("override ").lstrip("/"): shown(name)
        for file in recipes
        for choice in file.get("defaults", [])
        if not isinstance(choice, str)
        for key, name in choice.items()
    }
    values = groups | values
    chosen = dict.fromkeys(groups, Source.recipe) | provenance_of(typed, recipes)
    return [
        (key, shown(flat.get(key, values.get(key, ""))), source.name.replace("_", " "))
        for key, source in sorted(chosen.items(), key=lambda item: (-item[1], item[0]))
        if key not in NOT_TYPED and (key in flat or key in values)
    ]


def findings(
    folder: Path, rows: Sequence[Mapping[str, Any]]
) -> list[tuple[str, str, str, str]] | None:
    """List the health checks that found the run ill: check, when, first evidence, remedy.

    None without their file, as of runs of earlier versions.
    """
    if not (folder / HEALTH_FILE).is_file():
        return None
    first: dict[str, Mapping[str, Any]] = {}
    for entry in read_metrics(folder / HEALTH_FILE):
        first.setdefault(str(entry["check"]), entry)
    ill = Counter(name for row in rows for name in row if name.startswith("health/"))
    return [
        (
            check,
            "before the first step"
            if entry["step"] is None
            else f"step {entry['step']}, found in {ill[f'health/{check}']} of {len(rows)} steps",
            str(entry["evidence"]),
            str(entry["remedy"]),
        )
        for check, entry in first.items()
    ]


def end_of_log(path: Path) -> list[str]:
    """Return the last lines of main.log."""
    with suppress(OSError), path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - LOG_BYTES))
        return file.read().decode("utf-8", errors="replace").splitlines()[-LOG_LINES:]
    return []


def _json(path: Path) -> dict[str, Any]:
    """Read a JSON object; empty if it is missing or damaged."""
    with suppress(OSError, ValueError):
        value = json.loads(path.read_text(encoding="utf-8"))
        return value if isinstance(value, dict) else {}
    return {}
