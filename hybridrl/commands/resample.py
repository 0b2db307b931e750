"""`hybridrl replay <run> --step n --response k`: is a recorded response sampled again?

The weights are those of the checkpoint of the step before; prompt, seed and limits are the run's.
"""

import json
import tempfile
from contextlib import ExitStack
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hybridrl.app.compose import find_machine
from hybridrl.app.launch import check_data
from hybridrl.checkpoint.files import checkpoints_folder, step_name, steps_in
from hybridrl.commands.evaluation.config import evaluation_config
from hybridrl.commands.evaluation.options import Subject
from hybridrl.commands.running import UsageError, checkpoint_at
from hybridrl.config.command.command_line import parse_argv
from hybridrl.models.resolve import absolute_path, model_folder

if TYPE_CHECKING:
    from hybridrl.config.schema import RunConfig
    from hybridrl.data.sources.prompts import PromptSets
    from hybridrl.data.sources.tokenizer import Decode


class Sample(NamedTuple):
    """Tokens of a response, with vLLM's log-probs; None or 0 for tokens of an environment."""

    ids: list[int]
    log_probs: list[float | None]


class Recorded(NamedTuple):
    """A response as recorded: its line, and its tokens if they were recorded, too."""

    step: int
    response: int
    line: dict[str, Any]
    sample: Sample | None


def resample(run_dir: Path, step: int, response: int, *, runs_code: bool) -> tuple[bool, str]:
    """Sample a recorded response again; return whether its tokens are the same, and a finding.

    Raises:
        ConfigError: it is not recorded, there is no checkpoint of the step before, or the run's
            config cannot be used here.
    """
    recorded = read_recorded(run_dir, step, response)
    checkpoint = checkpoint_before(run_dir, step)
    subject = Subject("replay", checkpoint=checkpoint_at(checkpoint or run_dir))
    examined = evaluation_config(parse_argv([]), subject, find_machine(), runs_code=runs_code)
    config = examined.config
    model_folder(config.model)
    prompts = check_data(examined)
    # Heavy imports follow the checks.
    from hybridrl.controller.ray.runtime import ray_runtime
    from hybridrl.data.sources.tokenizer import decoder, load_tokenizer

    assert subject.checkpoint is not None
    rounds = subject.checkpoint.manifest.config["algorithm"]["max_sampling_rounds"]
    with ray_runtime(config.cluster, config.hardware.accelerator):
        config.model.path = absolute_path(config.model.path)
        decode = decoder(load_tokenizer(config.model.path))
        found = [
            compared(recorded, sample, decode)
            for sample in _samples(config, prompts, recorded, checkpoint, rounds, decode)
        ]
    # The round of dynamic sampling is not recorded: it is that of the longest match.
    same, text = max(found)[1:]
    return same, f"response {response} of step {step}: {text}"


def read_recorded(run_dir: Path, step: int, response: int) -> Recorded:
    """Read a response from rollouts/ and, if it is there, from tokens/."""
    path = run_dir / "rollouts" / f"step_{step}.jsonl"
    if not path.is_file():
        names = (file.stem.removeprefix("step_") for file in path.parent.glob("step_*.jsonl"))
        steps = ", ".join(map(str, sorted(map(int, names)))) or "none"
        raise UsageError(f"--step {step}: {path} does not exist.\nRecorded steps: {steps}.")
    lines = path.read_text(encoding="utf-8").splitlines()
    if not 0 <= response < len(lines):
        raise UsageError(f"--response {response}: expected 0 to {len(lines) - 1}, as in {path}.")
    sample, tokens = None, run_dir / "tokens" / f"step_{step}.parquet"
    if tokens.is_file():
        from pyarrow import parquet

        rows = parquet.read_table(tokens, filters=[("response", "==", response)]).to_pydict()
        sample = Sample(rows["token_id"], rows["rollout_log_prob"]) if rows["token_id"] else None
    return Recorded(step, response, json.loads(lines[response]), sample)


def checkpoint_before(run_dir: Path, step: int) -> Path | None:
    """Return the checkpoint of the weights that sampled a step; None: those before training."""
    folder = checkpoints_folder(run_dir)
    kept = steps_in(folder)
    if step == 1 or step - 1 in kept:
        return folder / step_name(step - 1) if step > 1 else None
    raise UsageError(
        f"--step {step}: its weights are those of checkpoint {step - 1}, which is not in {folder}."
        f"\nSteps with such a checkpoint: {', '.join(str(one + 1) for one in [0, *kept])}. "
        "checkpoint.every_steps=1 with checkpoint.keep_last=0 keeps all."
    )


def _samples(
    config: "RunConfig",
    prompts: "PromptSets",
    recorded: Recorded,
    checkpoint: Path | None,
    rounds: int,
    decode: "Decode",
) -> list[Sample]:
    """Start engines, and sample the response as each round would, on the first engine."""
    from dataclasses import replace

    import torch

    from hybridrl.commands.evaluation.session import rollout_engines
    from hybridrl.trainer.factory import generator_for, open_environment
    from hybridrl.trainer.sampling import request_of

    rollout, number = config.rollout, recorded.line["prompt_id"]
    asked = [prompt for prompt in prompts.train if prompt.prompt_id == number]
    each = rollout.responses_per_prompt
    request = request_of(
        asked * rounds, recorded.step, temperature=rollout.temperature, top_p=rollout.top_p
    )
    request = replace(
        request,
        first_sample=torch.arange(rounds) * each + recorded.response % each,
        engine=torch.zeros(rounds, dtype=torch.int64),
    )
    with ExitStack() as stack:
        logs = stack.enter_context(tempfile.TemporaryDirectory(prefix="hybridrl-replay-"))
        engines = rollout_engines(config, checkpoint, recorded.step, Path(logs), stack)
        environment = open_environment(config, stack)
        batch = generator_for(config, environment, engines, prompts, decode)(request)
    rows = zip(batch.responses.rows(), batch.rollout_log_probs.rows(), strict=True)
    return [Sample(ids.tolist(), log_probs.tolist()) for ids, log_probs in rows]


def compared(recorded: Recorded, found: Sample, decode: "Decode") -> tuple[int, bool, str]:
    """Return the number of equal tokens at the start, whether all are the same, and a finding.

    If only the text of the response was recorded, tokens are compared by it.
    """
    if recorded.sample is None:
        text, length = recorded.line["response"], recorded.line["length"]
        texts = decode(found.ids[: k + 1] for k in range(len(found.ids)))
        equal = len([*takewhile(lambda start: text.startswith(start.rstrip("\ufffd")), texts)])
        same = texts[-1:] == [text] and len(found.ids) == length
        if same:
            return equal, True, f"the same text of {length} tokens, of which no ids were recorded"
        return equal, False, f"its text differs from token {equal} on: {texts[-1]!r}, was {text!r}"
    ids, log_probs = recorded.sample
    pairs = zip(ids, found.ids, strict=False)
    equal = len([*takewhile(lambda pair: pair[0] == pair[1], pairs)])
    if ids != found.ids:
        was, now = (decode([part[equal : equal + 1]])[0] for part in (ids, found.ids))
        return equal, False, f"differs first at token {equal}: {now!r}, was {was!r}"
    numbers = zip(log_probs, found.log_probs, strict=True)
    far = max(abs(was - now) for was, now in numbers if was is not None and now is not None)
    bits = "are the same to the bit" if far == 0 else f"differ by up to {far:.3g} nats"
    return equal, True, f"the same {equal} tokens; their log-probs {bits}"
