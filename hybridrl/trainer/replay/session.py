"""Replay of a non-finite update, to find the responses that cause it.

batch fields    checked here, without a forward pass
weights         checked on the ranks
micro-batches   forward, loss and gradient of each, as in the update
responses       the same for each single response of non-finite micro-batches
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hybridrl.controller.worker_group import WorkerGroup, start_roles
from hybridrl.data.batch import RolloutBatch
from hybridrl.data.ragged import Ragged
from hybridrl.data.schedule import Epochs, ScheduledBatch
from hybridrl.trainer.replay.batch import ReplayBatch, texts_of
from hybridrl.trainer.replay.nonfinite import WEIGHTS_FOLDER
from hybridrl.trainer.tracking.best_effort_files import replace_file
from hybridrl.workers.replay import MicroBatchResult, ReplayConfig

RESULT_FILE = "replay.json"
# Outputs of the model, by role.
OUTPUTS = {"actor": "log_probs", "critic": "values"}
SHOWN_CHARACTERS = 40


class Located(NamedTuple):
    """Micro-batch of one rank; rows are indices into the whole batch."""

    rank: int
    rows: list[int]
    result: MicroBatchResult

    @property
    def is_finite(self) -> bool:
        """True if no value is NaN or infinite."""
        numbers = (self.result.loss, self.result.gradient_norm)
        return self.result.outputs_finite and all(map(math.isfinite, numbers))


@dataclass
class BadResponse:
    """Response with a non-finite value.

    Attributes:
        response: index in the batch.
        group_id: of its prompt.
        prompt, text: decoded.
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
    """Result of a replay.

    Attributes:
        role, step: of the update.
        weights: name -> number of non-finite elements.
        micro_batches: non-finite ones.
        responses: non-finite ones.
    """

    role: str
    step: int
    weights: dict[str, int]
    micro_batches: list[Located]
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
    """Start the run's workers with the saved weights and examine the batch; in `ray_runtime`.

    Args:
        kept: content of `folder`.
        folder: of the weights and of the workers' logs.
    """
    config = kept.config
    roles = ["rollout", "actor"] + ["critic"] * (kept.role == "critic")
    configs = {role: getattr(config, role) for role in roles}
    configs["replay"] = ReplayConfig(role=kept.role, fsdp=config.fsdp)
    group = start_roles(config, configs, folder)["replay"]
    with group.pool:
        group.call("load_weights", str((folder / WEIGHTS_FOLDER).resolve()))
        return examine(kept, group)


def examine(kept: ReplayBatch, group: WorkerGroup) -> Findings:
    """Find the non-finite values of an update.

    Args:
        kept: the update.
        group: replay workers of the role, with the weights of the update.
    """
    weights: dict[str, int] = {}
    for counts in group.call("nonfinite_weights"):
        for name, count in counts.items():
            weights[name] = weights.get(name, 0) + count
    replicas = kept.config.fsdp.dp_replicate
    micros = _examined(kept, group, kept.ranks)
    bad = [micro for micro in micros if not micro.is_finite]
    suspects = sorted({row for micro in bad for row in micro.rows})
    # All ranks compute the same response at the same time, as one mini-batch.
    alone: Epochs = [[[[row]] for row in suspects]]
    single = _examined(kept, group, [alone] * group.num_shards) if suspects else []
    return Findings(
        kept.role,
        kept.step,
        {name: count // replicas for name, count in weights.items()},
        bad,
        _responses(kept, {micro.rows[0]: micro for micro in single}),
    )


def _examined(kept: ReplayBatch, group: WorkerGroup, ranks: list[Epochs]) -> list[Located]:
    scheduled = _Unjoined.of(kept.batch, ranks)
    per_rank = group.call("examine_update", scheduled, kept.kl_coef)
    return [
        Located(rank, [scheduled.rows[rank][row] for row in result.rows], result)
        for rank, results in enumerate(per_rank)
        for result in results
    ]


def _responses(kept: ReplayBatch, alone: dict[int, Located]) -> list[BadResponse]:
    """List responses with non-finite values, in the batch's order."""
    texts, fields = texts_of(kept), nonfinite_fields(kept.batch)
    found = []
    for row in sorted({*fields, *alone}):
        bad = list(fields.get(row, []))
        text = texts[row]
        response = BadResponse(row, text.group_id, text.prompt, text.response, bad)
        if row in alone:
            result = alone[row].result
            response.loss, response.gradient_norm = result.loss, result.gradient_norm
            bad += [OUTPUTS[kept.role]] * (not result.outputs_finite)
            bad += ["loss"] * (not math.isfinite(result.loss))
            bad += ["gradient"] * (not math.isfinite(result.gradient_norm))
        if bad:
            found.append(response)
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
    plain = {
        "role": findings.role,
        "step": findings.step,
        "finite": findings.is_finite,
        "weights": findings.weights,
        "micro_batches": [
            {"rank": micro.rank, "responses": micro.rows} | _plain_micro(micro.result)
            for micro in findings.micro_batches
        ],
        "responses": [
            asdict(response)
            | {
                "loss": _json_number(response.loss),
                "gradient_norm": _json_number(response.gradient_norm),
            }
            for response in findings.responses
        ],
    }
    text = json.dumps(plain, indent=2, allow_nan=False) + "\n"
    return replace_file(folder / RESULT_FILE, lambda new: new.write_text(text, encoding="utf-8"))


def show(console: Console, findings: Findings) -> None:
    """Print the findings."""
    title = f"update of the {findings.role} in training step {findings.step}"
    if findings.is_finite:
        console.print(f"{title}: everything is finite", soft_wrap=True)
        return
    for name, count in findings.weights.items():
        console.print(f"weights: {count:,} elements of {name} are not finite", soft_wrap=True)
    for micro in findings.micro_batches:
        epoch, mini, index = micro.result.place
        rows = ", ".join(map(str, micro.rows))
        console.print(
            f"epoch {epoch}, mini-batch {mini}, micro-batch {index} on rank {micro.rank}: "
            f"loss {micro.result.loss:.3g}, gradient norm {micro.result.gradient_norm:.3g} "
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


def _plain_micro(result: MicroBatchResult) -> dict[str, Any]:
    return {
        "place": list(result.place),
        "loss": _json_number(result.loss),
        "gradient_norm": _json_number(result.gradient_norm),
        "outputs_finite": result.outputs_finite,
    }


def _json_number(value: float | None) -> float | str | None:
    """Convert NaN and infinity to text, which JSON lacks."""
    return value if value is None or math.isfinite(value) else str(value)


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
