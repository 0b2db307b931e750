"""The page: `write_report` makes one HTML file of runs. It needs no network.

Data and Plotly's script are packed (gzip, base64), so that no text of a model is HTML or script.
"""

import base64
import gzip
import json
import logging
import os
from collections.abc import Sequence
from datetime import datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from hybridrl.app.runs import RESULT_FILE
from hybridrl.config.errors import ConfigError
from hybridrl.trainer.tracking.best_effort_files import replace_text
from hybridrl.trainer.tracking.provenance import MANIFEST_FILE
from hybridrl.trainer.tracking.tracker import METRICS_FILE, REPORT_FILE

log = logging.getLogger(__name__)

MAX_BYTES = 8_000_000
# Characters of JSON that are read, and the smallest share of them that is tried.
MAX_CHARACTERS, MIN_SHARE = 15_000_000, 1e-3
TEMPLATES = files("hybridrl.report") / "templates"
RUN_FILES = (METRICS_FILE, RESULT_FILE, ".hydra")


def find_folders(paths: Sequence[Path]) -> list[Path]:
    """Return the folders of runs among paths; of another folder, such as a sweep's, those below."""
    folders: list[Path] = []
    for path in paths:
        for folder, inside, names in os.walk(path):
            if {*RUN_FILES} & {*names, *inside}:
                folders.append(Path(folder))
                inside.clear()
            inside.sort(key=lambda name: (len(name), name))
    return [*dict.fromkeys(folders)]


def write_report(folders: Sequence[Path], path: Path, max_bytes: int = MAX_BYTES) -> Path:
    """Write the report of runs, thinned until it has at most `max_bytes`; return `path`.

    Settings and 100 steps of the curves are always shown: hundreds of runs may take more.

    Raises:
        ConfigError: plotly is not installed.
        OSError: it cannot be written; an older one is unchanged.
    """
    # Imported when a report is written, not at the start of every run.
    from hybridrl.report.overview import overview
    from hybridrl.report.read import read_run, thinned

    try:
        plotly = _pack((files("plotly") / "package_data" / "plotly.min.js").read_bytes())
    except ModuleNotFoundError as error:
        raise ConfigError("plotly is not installed: pip install plotly") from error
    read = [read_run(folder, MAX_CHARACTERS // len(folders)) for folder in folders]
    about = [overview(folder, run["rows"]) for folder, run in zip(folders, read, strict=True)]
    groups, share = yaml.safe_load((TEMPLATES / "panels.yaml").read_text()), 1.0
    while True:
        runs = [
            {name: facts[name] for name in ("name", "folder", "state", "result")}
            | {"settings": {key: value for key, value, _ in facts["settings"]}}
            | thinned(run, share)
            for facts, run in zip(about, read, strict=True)
        ]
        data = _pack(json.dumps({"runs": runs, "groups": groups}, allow_nan=False).encode())
        notes = [run["notes"] for run in runs]
        page = _render(list(zip(about, notes, strict=True)), data, plotly)
        excess = len(page.encode()) - max_bytes
        if excess <= 0 or share < MIN_SHARE:
            return replace_text(path, page)
        share *= max(0.1, min(0.6, 1 - 1.2 * excess / len(data)))


def write_at_end(folder: Path) -> None:
    """Write the report of a run or sweep that ends, if any was started; failures are logged."""
    folders = find_folders([folder])
    if not any((one / MANIFEST_FILE).is_file() for one in folders):
        return
    try:
        log.info("report: %s", write_report(folders, folder / REPORT_FILE))
    # No kind of damage to a recorded file may fail a run.
    except Exception as error:
        reason = error.texts[0] if isinstance(error, ConfigError) else repr(error)
        log.warning("%s could not be written: %s", folder / REPORT_FILE, reason)


def _pack(content: bytes) -> str:
    return base64.b64encode(gzip.compress(content, 6, mtime=0)).decode("ascii")


def _render(runs: list[tuple[dict[str, Any], list[str]]], data: str, plotly: str) -> str:
    from jinja2 import Environment, PackageLoader

    environment = Environment(loader=PackageLoader("hybridrl.report"), autoescape=True)
    names = ("report.css", "records.js", "report.js")
    style, *scripts = ((TEMPLATES / name).read_text(encoding="utf-8") for name in names)
    now = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    page = environment.get_template("report.html.j2")
    packed = {"data": data, "plotly": plotly}
    return page.render(runs=runs, now=now, style=style, script="\n".join(scripts), **packed)
