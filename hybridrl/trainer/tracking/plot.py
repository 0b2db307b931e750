"""Plot of a run: reward or loss, response length, held-out accuracy and more over the steps."""

import importlib.util
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hybridrl.trainer.tracking.best_effort_files import replace_file
from hybridrl.trainer.tracking.summary import ACCURACY, accuracy_label
from hybridrl.trainer.tracking.tracker import METRICS_FILE, read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

log = logging.getLogger(__name__)

PLOT_FILE = "metrics.png"

_COLORS = ("#1f6fb2", "#d1622b", "#2e8b57", "#8a5fb0", "#7a7a7a", "#b0a12c")
# Line styles, so that colours can repeat.
_STYLES = ("-", "--", ":")

Rows = Sequence[Mapping[str, Any]]


class Panel(NamedTuple):
    """Panel of the plot: metrics by label, half-widths of confidence intervals by metric."""

    title: str
    unit: str
    metrics: Mapping[str, str]
    bands: Mapping[str, str] = MappingProxyType({})


PANELS = (
    Panel("Reward", "mean of a step", {"reward": "reward/mean"}),
    Panel("KL to the reference", "nats per token", {"KL": "actor/kl"}),
    Panel("Response length", "tokens", {"mean": "response/length_mean"}),
    Panel("Sampling speed", "tokens/s", {"all engines": "rollout/tokens_per_second"}),
    Panel("vLLM against trainer", "nats per token", {"difference": "rollout/log_prob_diff_mean"}),
)
# The same of supervised fine-tuning.
SUPERVISED_PANELS = (
    Panel("Loss", "nats per token", {"training": "actor/loss", "held out": "eval/nll"}),
    Panel("Gradient norm", "before clipping", {"norm": "actor/grad_norm"}),
    Panel("Learning rate", "of AdamW", {"learning rate": "actor/lr"}),
    Panel("Answer length", "tokens", {"mean": "response/length_mean"}),
    Panel("Training speed", "tokens/s", {"all ranks": "tokens_per_s/update_actor"}),
)

# Rules and groups in the last panel, if measured, after the user's own rules.
ACCURACIES = ("", "_greedy", "_flexible", "_unseen", "_unseen_flexible")
INTERVAL = "eval/ci95"


def draw(run_dir: Path, title: str) -> None:
    """Draw <run>/metrics.png from <run>/metrics.jsonl, if matplotlib is installed.

    Raises:
        OSError: the write failed; an older plot is unchanged.
    """
    if importlib.util.find_spec("matplotlib") is None:
        log.info("%s is not drawn: matplotlib is not installed", PLOT_FILE)
        return
    # Hides messages on fonts.
    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    # Imported here: the import needs most of a second, only at the end of a run.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = read_metrics(run_dir / METRICS_FILE)
    figure = Figure(figsize=(13.2, 6.4), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=12, fontweight="bold")
    is_supervised = any("eval/nll" in row for row in rows)
    panels = [*(SUPERVISED_PANELS if is_supervised else PANELS), _accuracy_panel(rows)]
    for axes, panel in zip(figure.subplots(2, 3).flat, panels, strict=True):
        _draw(axes, panel, rows)
    replace_file(run_dir / PLOT_FILE, lambda new: figure.savefig(new, format="png"))


def _accuracy_panel(rows: Rows) -> Panel:
    """Build the panel of held-out accuracies, by rule and group."""
    measured = {name for row in rows for name, value in row.items() if value is not None}
    suffixes = sorted(n.removeprefix(INTERVAL) for n in measured if n.startswith(INTERVAL))
    own = [suffix for suffix in suffixes if suffix not in ("_flexible", "_greedy_flexible")]
    shown = [s for s in dict.fromkeys([*own, *ACCURACIES]) if ACCURACY + s in measured]
    return Panel(
        "Held-out accuracy, 95 % interval",
        "mean score",
        {accuracy_label(suffix): ACCURACY + suffix for suffix in shown},
        {ACCURACY + suffix: INTERVAL + suffix for suffix in own},
    )


def _draw(axes: "Axes", panel: Panel, rows: Rows) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_title(panel.title, fontsize=10, loc="left")
    axes.set_ylabel(panel.unit, fontsize=8)
    axes.set_xlabel("step", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    looks = [(style, color) for style in _STYLES for color in _COLORS]
    for (style, color), (label, name) in zip(looks, panel.metrics.items(), strict=False):
        if len(points := _points(rows, name)):
            marker = "o" if len(points) < 30 else None
            axes.plot(*points.T, style, color=color, marker=marker, ms=3, label=label)
        if name in panel.bands and len(points := _points(rows, name, panel.bands[name])):
            steps, middle, width = points.T
            low, high = middle - width, middle + width
            axes.fill_between(steps, low, high, color=color, alpha=0.18, linewidth=0)
    if not axes.lines:
        axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", color="#888888")
    if len(axes.lines) > 1:
        axes.legend(fontsize=8, frameon=False)


def _points(rows: Rows, *names: str) -> np.ndarray:
    """Return [n, 1 + names]: the step and the metrics of the rows that know all of them."""
    known = [[row["step"], *(row.get(name) for name in names)] for row in rows]
    return np.array([row for row in known if None not in row])
