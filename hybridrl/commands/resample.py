"""`hybridrl replay <run> --step n --response k`: is a recorded response sampled again?

The weights are those of the checkpoint of the step before; prompt, seed and limits are the run's.
"""

import json
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hybridrl.app.compose import find_machine
from hybridrl.app.data import check_data
from hybridrl.checkpoint.files import checkpoints_folder, step_name, steps_in
from hybridrl.commands.evaluation.config import evaluation_config
from hybridrl.commands.evaluation.options import Subject
from hybridrl.commands.running import UsageError, checkpoint_at
from hybridrl.config.choices import Accelerator, Schedule
from hybridrl.config.command.command_line import parse_argv
from hybridrl.config.command.report import shown
from hybridrl.models.resolve import absolute_path, model_folder

if TYPE_CHECKING:
    from hybridrl.config.schema import RunConfig
    from hybridrl.data.sources.prompts import Prompt, PromptSets
    from hybridrl.data.sources.tokenizer import Decode


class Sample(NamedTuple):
    """Tokens of a response, with vLLM's log-probs; None or 0 for tokens of an environment."""

    ids: list[int]
    log_probs: list[float | None]


class Recorded(NamedTuple):
    """Response k of a step as recorded: the step's lines, and its tokens if they were recorded."""

    step: int
    response: int
    lines: list[dict[str, Any]]
    sample: Sample | None

    @property
    def line(self) -> dict[str, Any]:
        """Its own line."""
        return self.lines[self.response]


def resample(run_dir: Path, step: int, response: int, *, runs_code: bool) -> tuple[bool, str]:
    """Sample a recorded response again; return whether its tokens are the same, and a finding.

    Raises:
        ConfigError: it is not recorded, there is no checkpoint of the step before, or the run's
            config cannot be used here.
    """
    recorded = read_recorded(run_dir, step, response)
    checkpoint = checkpoint_before(run_dir, step)
    found = checkpoint_at(checkpoint or run_dir)
    run = found.manifest.config
    if run["algorithm"]["max_sampling_rounds"] > 1:
        raise UsageError(
            "algorithm.max_sampling_rounds > 1: responses of a round that were replaced are not "
            "recorded, and seeds count them.\nResponses of such a run cannot be replayed."
        )
    # A run of an earlier version has no schedule.
    if run["rollout"].get("schedule", Schedule.sync.value) != Schedule.sync.value:
        raise UsageError(
            f"rollout.schedule = {run['rollout']['schedule']}: a response has tokens of several "
            "steps, whose weights differ.\nResponses of such a run cannot be replayed."
        )
    if run.get("agent") is not None:
        raise UsageError(
            "environment=agent: what engines decode together depends on when programs ask.\n"
            "Responses of such a run cannot be replayed."
        )
    on_cpu = run["hardware"]["accelerator"] == Accelerator.cpu.value
    # As many threads for each rank: their number changes the rounding.
    line = ["hardware=cpu", f"cluster.gpus_per_node={run['cluster']['gpus_per_node']}"]
    subject, machine = Subject("replay", checkpoint=found), find_machine()
    examined = evaluation_config(
        parse_argv(line if on_cpu else []), subject, machine, runs_code=runs_code
    )
    config = examined.config
    model_folder(config.model)
    prompts = check_data(examined)
    asked = prompts_of(recorded, prompts)
    # Heavy imports follow the checks.
    from hybridrl.controller.ray.runtime import ray_runtime
    from hybridrl.data.sources.tokenizer import decoder, load_tokenizer

    engines = run["fsdp"]["dp_replicate"] * run["fsdp"]["dp_shard"]
    engines //= run["rollout"]["tensor_parallel_size"]
    with ray_runtime(config.cluster, config.hardware.accelerator):
        config.model.path = absolute_path(config.model.path)
        decode = decoder(load_tokenizer(config.model))
        sample = _sampled(config, prompts, recorded, asked, checkpoint, engines, decode)
    same, text = compared(recorded, sample, decode)
    return same, f"response {response} of step {step}: {text}"


def read_recorded(run_dir: Path, step: int, response: int) -> Recorded:
    """Read a response from rollouts/ and, if it is there, from tokens/."""
    path = run_dir / "rollouts" / f"step_{step}.jsonl"
    if not path.is_file():
        steps = ", ".join(map(str, recorded_steps(run_dir))) or "none"
        raise UsageError(f"--step {step}: {path} does not exist.\nRecorded steps: {steps}.")
    # Not splitlines, which cuts texts at other characters, too.
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    if not 0 <= response < len(lines):
        raise UsageError(f"--response {response}: expected 0 to {len(lines) - 1}, as in {path}.")
    sample, tokens = None, run_dir / "tokens" / f"step_{step}.parquet"
    if tokens.is_file():
        from pyarrow import parquet

        rows = parquet.read_table(tokens, filters=[("response", "==", response)]).to_pydict()
        sample = Sample(rows["token_id"], rows["rollout_log_prob"]) if rows["token_id"] else None
    return Recorded(step, response, [json.loads(line) for line in lines], sample)


def recorded_steps(run_dir: Path) -> list[int]:
    """Return the training steps whose responses are in rollouts/."""
    files = (run_dir / "rollouts").glob("step_*.jsonl")
    return sorted(int(file.stem.removeprefix("step_")) for file in files)


def checkpoint_before(run_dir: Path, step: int) -> Path | None:
    """Return the checkpoint of the weights that sampled a step; None: those before training."""
    folder = checkpoints_folder(run_dir)
    kept = steps_in(folder)
    if step == 1 or step - 1 in kept:
        return folder / step_name(step - 1) if step > 1 else None
    possible = [str(one) for one in recorded_steps(run_dir) if one - 1 in (0, *kept)]
    raise UsageError(
        f"--step {step}: its weights are those of checkpoint {step - 1}, which is not in {folder}."
        f"\nRecorded steps with such a checkpoint: {', '.join(possible) or 'none'}. "
        "checkpoint.every_steps=1 with checkpoint.keep_last=0 keeps all."
    )


def prompts_of(recorded: Recorded, prompts: "PromptSets") -> "list[Prompt]":
    """Return the prompt of each line; UsageError if one is no longer that of the run."""
    known = {prompt.prompt_id: prompt for prompt in prompts.train}
    for line in recorded.lines:
        number, was = line["prompt_id"], line["prompt"]
        now = known[number].text if number in known else "no such problem"
        if now != was:
            at = _num_equal(was, now)
            raise UsageError(
                f"{', '.join(facts.source for facts in prompts.data_sets)}: the prompt of training "
                f"problem {number} differs from character {at} on: {shown(now[at:])}\n"
                f"was: {shown(was[at:])}\nA replay needs data and chat template of the run."
            )
    return [known[line["prompt_id"]] for line in recorded.lines]


def _sampled(
    config: "RunConfig",
    prompts: "PromptSets",
    recorded: Recorded,
    asked: "Sequence[Prompt]",
    checkpoint: Path | None,
    engines: int,
    decode: "Decode",
) -> Sample:
    """Sample again what one of the run's engines sampled in the step; return the response.

    The engine had the same batch: alone, a response has log-probs that are rounded differently.
    """
    import torch

    from hybridrl.commands.evaluation.session import rollout_engines
    from hybridrl.data.lengths import ResponseLengths
    from hybridrl.trainer.factory import generator_for, open_environment
    from hybridrl.trainer.sampling.generation import request_of
    from hybridrl.trainer.state import read_state

    each, number = config.rollout.responses_per_prompt, recorded.line["prompt_id"]
    lengths = ResponseLengths()
    if checkpoint is not None:
        lengths.restore(read_state(checkpoint).lengths)
    request = request_of(
        asked[::each],
        recorded.step,
        temperature=config.rollout.temperature,
        top_p=config.rollout.top_p,
        samples=each,
    )
    parts = [piece() for (piece,) in lengths.expect(request).pieces(engines)]
    part = next(part for part in parts if number in part.prompt_id)
    part = replace(part, engine=torch.zeros(len(part), dtype=torch.int64))
    with ExitStack() as stack:
        logs = stack.enter_context(tempfile.TemporaryDirectory(prefix="hybridrl-replay-"))
        rollout = rollout_engines(config, checkpoint, recorded.step, Path(logs), stack)
        environment = open_environment(config, stack)
        batch = generator_for(config, environment, rollout, prompts, decode, stack)(part)
    row = part.prompt_id.tolist().index(number) * each + recorded.response % each
    ids, log_probs = batch.responses.rows()[row], batch.rollout_log_probs.rows()[row]
    return Sample(ids.tolist(), log_probs.tolist())


def compared(recorded: Recorded, found: Sample, decode: "Decode") -> tuple[bool, str]:
    """Return whether all tokens are the same, and a finding.

    If only the text of the response was recorded, tokens are compared by it.
    """
    if recorded.sample is None:
        text, length = recorded.line["response"], recorded.line["length"]
        texts = decode(found.ids[: k + 1] for k in range(len(found.ids)))
        if texts[-1] == text and len(found.ids) == length:
            return True, f"the same text of {length} tokens, of which no ids were recorded"
        equal = len([*takewhile(lambda start: text.startswith(start.rstrip("\ufffd")), texts)])
        return False, f"its text differs from token {equal} on: {texts[-1]!r}, was {text!r}"
    ids, log_probs = recorded.sample
    if ids != found.ids:
        equal = _num_equal(ids, found.ids)
        was, now = (decode([part[equal : equal + 1]])[0] for part in (ids, found.ids))
        return False, f"differs first at token {equal}: {now!r}, was {was!r}"
    numbers = zip(log_probs, found.log_probs, strict=True)
    far = max(abs(was - now) for was, now in numbers if was is not None and now is not None)
    bits = "are the same to the bit" if far == 0 else f"differ by up to {far:.3g} nats"
    return True, f"the same {len(ids)} tokens; their log-probs {bits}"


def _num_equal(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the number of equal elements at the beginning."""
    pairs = zip(one, other, strict=False)
    return len([*takewhile(lambda pair: pair[0] == pair[1], pairs)])
