"""Draw the plots of RESULTS.md from the stored lines: benchmarks/results/<bench>.svg.

Run        python benchmarks/plots.py
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib import rc_context
from matplotlib.figure import Figure

RESULTS = Path(__file__).parent / "results"
COLORS = ("#1f6fb2", "#d1622b", "#2e8b57", "#8a5fb0")

Line = Mapping[str, Any]
# Label of a group of bars -> name of a bar -> its length; zero: not drawn.
Groups = dict[str, dict[str, float]]


class Plot(NamedTuple):
    """Plot of a bench: its title, what the bars show, and the groups that a line adds."""

    bench: str
    title: str
    unit: str
    groups: Callable[[Line], Groups]
    stacked: bool = False
    log: bool = False


def training(line: Line) -> Groups:
    """MFU with sequences of equal length, by variant of the layers."""
    settings, found = line["settings"], line["measured"]
    kept = ", kept gathered" if settings["keep_gathered"] else ""
    length = "" if settings["length"] == 4096 else f", sequences of {settings['length']:,}"
    batch = settings["max_tokens"]
    larger = "" if batch == 16384 else f", micro-batches of {batch:,}"
    shape = "" if settings["shape"] == "1.5b" else f"{settings['shape']}, "
    return {
        f"{shape}{where(line)}, {variant}{kept}{length}{larger}": {
            "update": 100 * found[variant]["equal"]["update_mfu"],
            "log-probs": 100 * found[variant]["equal"]["log_probs_mfu"],
        }
        for variant in settings["variants"].split(",")
    }


def reshard(line: Line) -> Groups:
    """Milliseconds of a sync, of its floor and of the usual path."""
    found = line["measured"]
    times = {"sync": found["sync_ms"][1], "with verification": found["sync_verified_ms"][1]}
    times |= {"floor": found["floor_ms"]}
    if "usual_ms" in found:  # FP8 weights have none
        times |= {"usual path": min(ms[1] for ms in found["usual_ms"].values())}
    settings = line["settings"]
    fp8 = ", FP8" if settings.get("weights") == "fp8" else ""
    return {f"{settings['model_size']}, {where(line)}, tp {settings['tp']}{fp8}": times}


def rollout(line: Line) -> Groups:
    """Thousands of tokens per second."""
    speeds = line["measured"]["tokens_per_second"]
    labels = {
        "worker": "rollout worker",
        "plain": "LLM.generate, plain",
        "equal": "LLM.generate, seeds and log-probs",
        "alone": "vLLM in its own process",
    }
    name = f"{line['settings']['model']}, {where(line)}"
    return {name: {labels[key]: speed / 1e3 for key, speed in speeds.items()}}


def grpo_step(line: Line) -> Groups:
    """Seconds of the parts of a step that it has; of PPO with those of reference and critic."""
    found, settings = line["measured"], line["settings"]
    parts = {
        "rollout": found.get("rollout_s", 0.0),
        "log-probs and values": sum(
            found.get(f"{name}_s") or 0.0 for name in ("old_log_probs", "ref_log_probs", "values")
        ),
        "update": found.get("update_s", 0.0) + found.get("update_critic_s", 0.0),
    }
    other = found["step_s"] - sum(parts.values())
    parts |= {"other, or not known by part": other}
    system = line.get("system", "hybridrl")
    shape = "" if settings["shape"] == "1.5b" else f"{settings['shape']}, "
    recipe = "" if settings["recipe"] == "gsm8k_grpo" else f"{settings['recipe']}, "
    place = f"{settings['preset']}, {recipe}{shape}{gpus(line)}{remark(line)}"
    name = f"{place}\n{system}{versions(line)}"
    return {name: parts}


def agents(line: Line) -> Groups:
    """Thousands of sampled tokens per second."""
    ways, name = ("batch", "agents"), where(line)
    return {name: {way: line["measured"][way]["tokens_per_s"] / 1e3 for way in ways}}


def long_tail(line: Line) -> Groups:
    """Thousands of trained tokens per second."""
    settings = line["settings"]
    own = [key for key in settings["overrides"] if key.startswith("rollout.")]
    changed = f" ({', '.join(own)})" if own else ""
    shape = "" if settings["shape"] == "1.5b" else f", {settings['shape']}"
    name = f"{settings['schedule']}{shape}{changed}\n{where(line)}"
    return {name: {"trained": line["measured"]["trained_tokens_per_s"] / 1e3}}


def transport(line: Line) -> Groups:
    """Milliseconds that a step waits for data."""
    times = {name: ms[1] for name, ms in line["measured"]["ms_min_median_max"].items()}
    whole = {"as it is": times["all"]}
    alone = {"scores and updates alone": times["schedule"] + times["score"] + times["update"]}
    anew = {"the same, sent anew in each call": times["each_call"]}
    return {f"{line['settings']['ranks']} ranks": whole | alone | anew}


def offload(line: Line) -> Groups:
    """GB per second of moves between GPU and host."""
    speeds = {
        name.removesuffix("_gb_per_s_min_median_max").replace("_", " "): values[1]
        for name, values in line["measured"].items()
        if name.endswith("_gb_per_s_min_median_max")
    }
    return {where(line): speeds}


def checkpoint(line: Line) -> Groups:
    """Seconds of a save."""
    found = line["measured"]
    waits = {"training waits": found["blocked_s_first"], "on the disk after": found["write_s"][0]}
    plain = {"torch.save of the same, training waits": found["plain_torch_save_s"]}
    return {f"{where(line)}, {found['gb']:.0f} GB": waits | plain}


def shown(number: float) -> str:
    """Three digits, or all before the point."""
    return f"{number:,.0f}" if number >= 1000 else f"{number:.3g}"


def where(line: Line) -> str:
    """GPUs, remark and, in a new row, versions of a line."""
    return f"{gpus(line)}{remark(line)}\n{versions(line).removeprefix(', ')}"


def gpus(line: Line) -> str:
    """Number and name of a line's GPUs."""
    settings = line["settings"]
    count = settings.get("ranks", settings.get("gpus", settings.get("tp", 1)))
    return f"{count} {line['device'].removeprefix('NVIDIA ').removesuffix(' 80GB HBM3')}"


def remark(line: Line) -> str:
    """Remark of a line, as part of a label."""
    return f", {line['remark']}" if "remark" in line else ""


def versions(line: Line) -> str:
    """Versions of a line, as part of a label."""
    return "".join(f", {name} {version}" for name, version in line["versions"].items())


PLOTS = (
    Plot("training", "Training, sequences of 4,096 tokens unless said", "MFU, %", training),
    Plot("reshard", "Weight sync", "milliseconds", reshard, log=True),
    Plot("rollout", "Sampling", "thousands of tokens/s", rollout),
    Plot(
        "grpo_step",
        "A step of GRPO if no recipe is named, Qwen2.5-1.5B's shape if none is",
        "seconds",
        grpo_step,
        stacked=True,
    ),
    Plot("agents", "Sampling by agents and in one batch", "thousands of tokens/s", agents),
    Plot("long_tail", "Schedules with a long tail", "thousands of tokens/s", long_tail),
    Plot("transport", "Data of a step, 1,024 responses of 512 tokens", "milliseconds", transport),
    Plot("offload", "Offload to host memory", "GB/s", offload),
    Plot("checkpoint", "Checkpoint of Qwen2.5-7B's shape", "seconds", checkpoint, log=True),
)


def draw(plot: Plot, folder: Path) -> Path:
    """Draw a plot into `folder`; return the file."""
    groups: Groups = {}
    for text in (RESULTS / f"{plot.bench}.jsonl").read_text().splitlines():
        for name, group in plot.groups(json.loads(text)).items():
            label, runs = name, 1
            while label in groups:
                runs += 1
                label = f"{name}, run {runs}"
            groups[label] = group
    bars = list(dict.fromkeys(name for group in groups.values() for name in group))
    rows = len(groups) * (1 if plot.stacked else len(bars)) + len(groups)
    figure = Figure(figsize=(8.4, 1.2 + 0.24 * rows), layout="constrained")
    axes = figure.subplots()
    height = 0.7 if plot.stacked else 0.8 / len(bars)
    for at, group in enumerate(groups.values()):
        left = 0.0
        for number, name in enumerate(bars):
            length = group.get(name, 0.0)
            y = at if plot.stacked else at + (number - (len(bars) - 1) / 2) * height
            labelled = name if at == 0 else None
            axes.barh(y, length, height, left, color=COLORS[number], label=labelled)
            if plot.stacked:
                left += length
            elif name in group:
                axes.annotate(f" {shown(length)}", (length, y), va="center", fontsize=7)
        if plot.stacked:
            axes.annotate(f" {shown(left)}", (left, at), va="center", fontsize=7)
    axes.set_yticks(range(len(groups)), list(groups), fontsize=7)
    axes.invert_yaxis()
    axes.set_xscale("log" if plot.log else "linear")
    axes.set_xlabel(plot.unit, fontsize=8)
    axes.tick_params(axis="x", labelsize=7)
    axes.margins(x=0.1, y=0.02)
    axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(plot.title, fontsize=10, fontweight="bold")
    figure.legend(loc="outside lower center", ncols=len(bars), fontsize=7, frameon=False)
    path = folder / f"{plot.bench}.svg"
    with rc_context({"svg.hashsalt": "hybridrl", "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None})
    return path


def main() -> None:
    """Draw all plots; the same lines give the same files."""
    for plot in PLOTS:
        print(draw(plot, RESULTS))


if __name__ == "__main__":
    main()
