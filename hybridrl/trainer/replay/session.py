"""Replay of a non-finite update, to find the responses that cause it.

batch fields    checked here, without a forward pass
weights         checked on the ranks
micro-batches   forward, loss and gradient of each, as in the update
responses       the same for each single response of non-finite micro-batches
"""

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hybridrl.controller.worker_group import WorkerGroup, build_workers, open_pool
from hybridrl.data.batch import RolloutBatch
from hybridrl.data.ragged import Ragged
from hybridrl.data.schedule import Epochs, ScheduledBatch
from hybridrl.trainer.replay.nonfinite import WEIGHTS_FOLDER, ReplayBatch, texts_of
from hybridrl.trainer.tracking.best_effort_files import replace_text
from hybridrl.workers.replay import ReplayConfig

RESULT_FILE = "replay.json"
# Outputs of the model, by role.
OUTPUTS = {"actor": "log_probs", "critic": "values"}
SHOWN_CHARACTERS = 40


@dataclass
class MicroBatch:
    """`MicroBatchResult` of a rank; responses are indices in the whole batch."""

    rank: int
    responses: list[int]
    place: tuple[int, int, int]
    loss: float
    gradient_norm: float
    outputs_finite: bool

    def bad(self, role: str) -> list[str]:
        """Name the non-finite values."""
        finite = {
            OUTPUTS[role]: self.outputs_finite,
            "loss": math.isfinite(self.loss),
            "gradient": math.isfinite(self.gradient_norm),
        }
        return [name for name, is_finite in finite.items() if not is_finite]


@dataclass
class BadResponse:
    """Response with a non-finite value.

    Attributes:
        response: index in the batch.
        bad: non-finite values: fields of the batch, log_probs or values, loss, gradient.
        loss, gradient_norm: of the response alone; None if its micro-batch was finite.
    """

    response: int
    group_id: int
    prompt: str
    text: str
    bad: list[str]
    loss: float | None = None
    gradient_norm: float | None = None


@dataclass
class Findings:
    """Result of a replay, as in replay.json: non-finite weights (name -> number of elements),
    micro-batches and responses of an update.
    """

    role: str
    step: int
    weights: dict[str, int]
    micro_batches: list[MicroBatch]
    responses: list[BadResponse]

    @property
    def is_finite(self) -> bool:
        """True if everything is finite."""
        return not (self.weights or self.micro_batches or self.responses)


class _Unjoined(ScheduledBatch):
    """Batch whose results are not joined over shards."""

    def join(self, results: Sequence[Any]) -> list[Any]:  # type: ignore[override]
        """Return the results unchanged."""
        return list(results)


def replay(kept: ReplayBatch, folder: Path) -> Findings:
    """Start the run's workers with the saved weights and examine the batch; in `ray_runtime`."""
    config = kept.config
    roles = ["rollout", "actor"] + ["critic"] * (kept.role == "critic")
    configs = {role: getattr(config, role) for role in roles}
    configs["replay"] = ReplayConfig(role=kept.role, fsdp=config.fsdp)
    pool = open_pool(config, configs, folder)
    group = build_workers(config, configs, pool)["replay"]
    with pool:
        group.call("load_weights", str((folder / WEIGHTS_FOLDER).resolve()))
        return examine(kept, group)


def examine(kept: ReplayBatch, group: WorkerGroup) -> Findings:
    """Find the non-finite values of an update; `group` has its weights."""
    weights: Counter[str] = Counter()
    for counts in group.call("nonfinite_weights"):
        weights.update(counts)
    replicas = kept.config.fsdp.dp_replicate
    bad = [micro for micro in _examined(kept, group, kept.ranks) if micro.bad(kept.role)]
    suspects = sorted({row for micro in bad for row in micro.responses})
    # All ranks compute the same response at the same time, as one mini-batch.
    alone: Epochs = [[[[row]] for row in suspects]]
    single = _examined(kept, group, [alone] * group.num_shards) if suspects else []
    return Findings(
        kept.role,
        kept.step,
        {name: count // replicas for name, count in weights.items()},
        bad,
        _responses(kept, {micro.responses[0]: micro for micro in single}),
    )


def _examined(kept: ReplayBatch, group: WorkerGroup, ranks: list[Epochs]) -> list[MicroBatch]:
    scheduled = _Unjoined.of(kept.batch, ranks)
    per_rank = group.call("examine_update", scheduled, kept.kl_coef)
    return [
        MicroBatch(
            rank,
            [scheduled.rows[rank][row] for row in found.rows],
            found.place,
            found.loss,
            found.gradient_norm,
            found.outputs_finite,
        )
        for rank, results in enumerate(per_rank)
        for found in results
    ]


def _responses(kept: ReplayBatch, alone: dict[int, MicroBatch]) -> list[BadResponse]:
    """List responses with non-finite values, in the batch's order."""
    texts, fields = texts_of(kept), nonfinite_fields(kept.batch)
    found = []
    for row in sorted({*fields, *alone}):
        single = alone.get(row)
        bad = fields.get(row, []) + ([] if single is None else single.bad(kept.role))
        if bad:
            numbers = () if single is None else (single.loss, single.gradient_norm)
            found.append(BadResponse(row, *texts[row], bad, *numbers))
    return found


def nonfinite_fields(batch: RolloutBatch) -> dict[int, list[str]]:
    """List the fields that are non-finite on sampled tokens, by response."""
    found: dict[int, list[str]] = {}
    sampled = batch.response_mask.values
    row_of = batch.responses.row_ids()
    for name, field in vars(batch).items():
        if not isinstance(field, Ragged) or not field.values.is_floating_point():
            continue
        bad = field.values.isfinite().logical_not() & sampled
        for row in torch.unique(row_of[bad]).tolist():
            found.setdefault(row, []).append(name)
    return found


def write_findings(folder: Path, findings: Findings) -> Path:
    """Write replay.json; return its path."""
    plain = asdict(findings) | {"finite": findings.is_finite}
    # JSON has no NaN and infinity: they become texts.
    plain = json.loads(json.dumps(plain), parse_constant=lambda number: str(float(number)))
    return replace_text(folder / RESULT_FILE, json.dumps(plain, indent=2) + "\n")


def show(console: Console, findings: Findings) -> None:
    """Print the findings."""
    title = f"update of the {findings.role} in training step {findings.step}"
    if findings.is_finite:
        console.print(f"{title}: everything is finite", soft_wrap=True)
        return
    for name, count in findings.weights.items():
        console.print(f"weights: {count:,} elements of {name} are not finite", soft_wrap=True)
    for micro in findings.micro_batches:
        epoch, mini, index = micro.place
        rows = ", ".join(map(str, micro.responses))
        console.print(
            f"epoch {epoch}, mini-batch {mini}, micro-batch {index} on rank {micro.rank}: "
            f"loss {micro.loss:.3g}, gradient norm {micro.gradient_norm:.3g} "
            f"(with the other ranks'), responses {rows}",
            soft_wrap=True,
        )
    if not findings.responses:
        console.print("each single response is finite on its own", soft_wrap=True)
        return
    console.print(_table(title, findings.responses))


def _table(title: str, responses: Sequence[BadResponse]) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("response", "prompt", "not finite", "loss", "gradient", "prompt's end", "text"):
        table.add_column(column)
    for response in responses:
        prompt = " ".join(response.prompt.split())[-SHOWN_CHARACTERS:]
        text = " ".join(response.text.split())[:SHOWN_CHARACTERS]
        table.add_row(
            str(response.response),
            str(response.group_id),
            ", ".join(response.bad),
            _shown(response.loss),
            _shown(response.gradient_norm),
            Text(prompt),
            Text(text),
        )
    return table


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
