"""Replay of a non-finite update, to find the responses that cause it.

batch fields    checked here, without a forward pass
weights         checked on the ranks
micro-batches   forward, loss and gradient of each, as in the update
responses       the same for each single response of non-finite micro-batches
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from hybridrl.config.errors import ConfigError
from hybridrl.config.load import load_resolved
from hybridrl.config.user_code.untrusted_code import refuse_untrusted_code
from hybridrl.controller.worker_group import WorkerGroup, build_workers, open_pool, role_configs
from hybridrl.data.batch import Added, RolloutBatch
from hybridrl.data.ragged import Ragged
from hybridrl.data.schedule import Epochs, ScheduledBatch
from hybridrl.replay.worker import MicroBatch, ReplayConfig
from hybridrl.trainer.nonfinite import (
    FACTS_FILE,
    FORMAT,
    PROMPT_LENGTHS,
    REPLAY_FOLDER,
    RESPONSE_LENGTHS,
    ROLES,
    TENSORS_FILE,
    WEIGHTS_FOLDER,
    ReplayBatch,
    texts_of,
)
from hybridrl.trainer.tracking.best_effort_files import replace_text

RESULT_FILE = "replay.json"
SHOWN_CHARACTERS = 40
# Ragged fields, with the lengths of prompts or responses.
_RAGGED = {f.name for f in fields(RolloutBatch) if "Ragged" in str(f.type)} | {
    name for name, f in vars(RolloutBatch).items() if isinstance(f, Added) and f.kind is Ragged
}


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
    """Result of a replay, as in replay.json.

    `weights` are numbers of non-finite elements by name.
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


def read_replay(folder: Path, *, runs_code: bool) -> ReplayBatch:
    """Read the files that `NonFiniteGuard` wrote.

    With `runs_code`, code outside hybridrl that the config names may be imported.

    Raises:
        ConfigError: the batch is missing or damaged, or names foreign code.
    """
    try:
        facts = json.loads((folder / FACTS_FILE).read_text(encoding="utf-8"))
        batch = _batch(load_file(folder / TENSORS_FILE))
        if facts["format"] != FORMAT or facts["role"] not in ROLES:
            raise ValueError(f"format {facts['format']}, role {facts['role']}")
        step, kl_coef, ranks = int(facts["step"]), float(facts["kl_coef"]), facts["ranks"]
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise ConfigError(
            f"{folder} does not hold a batch to replay ({type(error).__name__}: {error}).\n"
            f"Name a folder <run>/{REPLAY_FOLDER}/step_<n> of a run that was stopped because its "
            "steps were not finite."
        ) from error
    if facts.get("images"):
        raise ConfigError(f"{folder}: its prompts have images, which a replay does not have yet.")
    if not runs_code:
        refuse_untrusted_code(facts["config"], str(folder))
    config = load_resolved(facts["config"])
    if config.teacher is not None and "advantages" not in batch.added:
        raise ConfigError(
            f"{folder} holds given answers, whose loss is the divergence from teachers, which a "
            f"replay has not.\nLook at them in the run's data, or set teacher.given_fraction=0."
        )
    return ReplayBatch(facts["role"], step, kl_coef, batch, ranks, config)


def _batch(tensors: dict[str, Tensor]) -> RolloutBatch:
    lengths = {"prompts": tensors.pop(PROMPT_LENGTHS)}
    responses = tensors.pop(RESPONSE_LENGTHS)
    if (experts := tensors.get("routed_experts")) is not None:
        tokens = lengths["prompts"] + responses
        lengths["routed_experts"] = tokens * (len(experts) // int(tokens.sum()))
    if (counts := tensors.get("kept_counts")) is not None:
        of_rows = Ragged(counts, responses).rows()
        lengths["kept_ids"] = torch.tensor([int(row.sum()) for row in of_rows])
    values = {
        name: Ragged(tensor, lengths.get(name, responses)) if name in _RAGGED else tensor
        for name, tensor in tensors.items()
    }
    return RolloutBatch.of(values)


def replay(kept: ReplayBatch, folder: Path) -> Findings:
    """Start the run's workers with the saved weights and examine the batch; in `ray_runtime`."""
    config = kept.config
    roles = ["rollout", "actor"] + ["critic"] * (kept.role == "critic")
    configs = {role: role_configs(config)[role] for role in roles}
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
        replace(micro, rank=rank, responses=[scheduled.rows[rank][k] for k in micro.responses])
        for rank, micros in enumerate(per_rank)
        for micro in micros
    ]


def _responses(kept: ReplayBatch, alone: dict[int, MicroBatch]) -> list[BadResponse]:
    """List responses with non-finite values, in the batch's order."""
    texts, bad_fields = texts_of(kept), nonfinite_fields(kept.batch)
    responses = []
    for row in sorted({*bad_fields, *alone}):
        single = alone.get(row)
        bad = bad_fields.get(row, []) + ([] if single is None else single.bad(kept.role))
        if bad:
            numbers = () if single is None else (single.loss, single.gradient_norm)
            responses.append(BadResponse(row, *texts[row], bad, *numbers))
    return responses


def nonfinite_fields(batch: RolloutBatch) -> dict[int, list[str]]:
    """List the fields that are non-finite on sampled tokens, by response."""
    by_response: dict[int, list[str]] = {}
    sampled, row_of = batch.response_mask.values, batch.responses.row_ids()
    for name, field in batch.tensors().items():
        if not isinstance(field, Ragged) or not field.values.is_floating_point():
            continue
        bad = field.values.isfinite().logical_not() & sampled
        for row in torch.unique(row_of[bad]).tolist():
            by_response.setdefault(row, []).append(name)
    return by_response


def write_findings(folder: Path, findings: Findings) -> Path:
    """Write replay.json; return its path."""
    plain = asdict(findings) | {"finite": findings.is_finite}
    # JSON has no NaN and infinity: they become texts.
    plain = json.loads(json.dumps(plain), parse_constant=lambda number: str(float(number)))
    return replace_text(folder / RESULT_FILE, json.dumps(plain, indent=2) + "\n")


def show(console: Console, findings: Findings) -> None:
    """Print the findings."""
    title = f"update of the {findings.role} in training step {findings.step}"
    lines = [
        f"weights: {count:,} elements of {name} are not finite"
        for name, count in findings.weights.items()
    ]
    for micro in findings.micro_batches:
        epoch, mini, index = micro.place
        lines.append(
            f"epoch {epoch}, mini-batch {mini}, micro-batch {index} on rank {micro.rank}: "
            f"loss {micro.loss:.3g}, gradient norm {micro.gradient_norm:.3g} "
            f"(with the other ranks'), responses {', '.join(map(str, micro.responses))}"
        )
    if findings.is_finite:
        lines = [f"{title}: everything is finite"]
    elif not findings.responses:
        lines.append("each single response is finite on its own")
    for line in lines:
        console.print(line, soft_wrap=True)
    if findings.responses:
        console.print(_table(title, findings.responses))


def _table(title: str, responses: Sequence[BadResponse]) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("response", "prompt", "not finite", "loss", "gradient", "prompt's end", "text"):
        table.add_column(column)
    for one in responses:
        numbers = ("-" if x is None else f"{x:.3g}" for x in (one.loss, one.gradient_norm))
        prompt = " ".join(one.prompt.split())[-SHOWN_CHARACTERS:]
        text = " ".join(one.text.split())[:SHOWN_CHARACTERS]
        ids = str(one.response), str(one.group_id)
        table.add_row(*ids, ", ".join(one.bad), *numbers, Text(prompt), Text(text))
    return table
