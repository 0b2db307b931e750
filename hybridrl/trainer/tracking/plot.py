"""Plot of a run: reward, KL, response length and held-out accuracy over the steps."""

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

PLOT_FILE = "metrics.png"

_COLORS = ("#1f6fb2", "#d1622b", "#2e8b57", "#8a5fb0", "#7a7a7a", "#b0a12c")
# Line styles, so that colours can repeat.
_STYLES = ("-", "--", ":")


class Panel(NamedTuple):
    """Panel of the plot.

    Attributes:
        title, unit: above it and beside it.
        metrics: label -> metric.
        bands: label -> metric with the half-width of its confidence interval.
    """

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

# Rules and groups in the last panel, if measured, after the user's own rules.
ACCURACIES = ("", "_greedy", "_flexible", "_unseen", "_unseen_flexible")
INTERVAL = "eval/ci95"


def plot_run(run_dir: Path, title: str) -> Path:
    """Draw <run>/metrics.png from <run>/metrics.jsonl; return its path.

    Raises:
        OSError: the write failed; an older plot is unchanged.
    """
    # Hides messages on fonts.
    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    # Imported here: the import needs most of a second, only at the end of a run.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = read_metrics(run_dir / METRICS_FILE)
    figure = Figure(figsize=(13.2, 6.4), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=12, fontweight="bold")
    panels = [*PANELS, _accuracy_panel(rows)]
    for axes, panel in zip(figure.subplots(2, 3).flat, panels, strict=True):
        _draw(axes, panel, rows)
    return replace_file(run_dir / PLOT_FILE, lambda new: figure.savefig(new, format="png"))


def _accuracy_panel(rows: Sequence[Mapping[str, Any]]) -> Panel:
    """Build the panel of held-out accuracies, by rule and group."""
    measured = {name for row in rows for name, value in row.items() if value is not None}
    own = sorted(
        suffix
        for name in measured
        if name.startswith(INTERVAL)
        and (suffix := name.removeprefix(INTERVAL)) not in ("_flexible", "_greedy_flexible")
    )
    labels = {
        suffix: accuracy_label(suffix)
        for suffix in dict.fromkeys([*own, *ACCURACIES])
        if ACCURACY + suffix in measured
    }
    return Panel(
        "Held-out accuracy, 95 % interval",
        "mean score",
        {label: ACCURACY + suffix for suffix, label in labels.items()},
        {label: INTERVAL + suffix for suffix, label in labels.items() if suffix in own},
    )


def _draw(axes: "Axes", panel: Panel, rows: Sequence[Mapping[str, Any]]) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_title(panel.title, fontsize=10, loc="left")
    axes.set_ylabel(panel.unit, fontsize=8)
    axes.set_xlabel("step", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.25, linewidth=0.6)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    drawn = 0
    looks = [(style, color) for style in _STYLES for color in _COLORS]
    for (style, color), (label, name) in zip(looks, panel.metrics.items(), strict=False):
        points = [(row["step"], row[name]) for row in rows if name in row and row[name] is not None]
        if points:
            marker = "o" if len(points) < 30 else None
            x, y = zip(*points, strict=True)
            axes.plot(x, y, style, color=color, marker=marker, ms=3, label=label)
            if label in panel.bands:
                _draw_band(axes, color, rows, name, panel.bands[label])
            drawn += 1
    if not drawn:
        axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", color="#888888")
    if drawn > 1:
        axes.legend(fontsize=8, frameon=False)


def _draw_band(
    axes: "Axes", color: str, rows: Sequence[Mapping[str, Any]], name: str, band: str
) -> None:
    """Draw the confidence interval of a curve."""
    known = [row for row in rows if band in row and row[band] is not None]
    if known:
        middle, width = np.array([[row[name], row[band]] for row in known]).T
        steps = [row["step"] for row in known]
        axes.fill_between(
            steps, middle - width, middle + width, color=color, alpha=0.18, linewidth=0
        )
