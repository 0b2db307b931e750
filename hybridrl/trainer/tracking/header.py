"""Header of a run: model, data, method, batch, steps, in a few lines."""

from pathlib import Path

from hybridrl.config.choices import IN_PARTS, Init, RewardSignature
from hybridrl.config.errors import shown
from hybridrl.config.estimators import is_supervised
from hybridrl.config.planner.shape import Frozen
from hybridrl.config.planner.world import (
    data_shards,
    engine_ranks,
    num_engines,
    rollout_weights,
    training_ranks,
    world_size,
)
from hybridrl.config.policy_losses import targets_of
from hybridrl.config.schema import RunConfig
from hybridrl.config.sections import FunctionConfig
from hybridrl.data.sources.prompts import DataSetSummary, PromptSets
from hybridrl.rewards.calls import reward_call

# More evaluation steps are shown as a count.
MAX_STEPS_SHOWN = 6


def header_lines(
    config: RunConfig,
    run_dir: Path,
    machine: str,
    prompts: PromptSets,
    parameters: int,
    frozen: Frozen = (),
    adapter_parameters: int = 0,
) -> list[tuple[str, str]]:
    """Build the header as (label, text) pairs.

    `parameters` are counts, of the model and the adapters.
    """
    reason = config.hardware.reason
    lines = [
        ("run", f"{config.run.name}, seed {config.seed}"),
        ("directory", str(run_dir)),
        ("machine", "" if machine in reason else machine),
        ("hardware", f"{config.hardware.accelerator.value}: {reason}"),
        ("model", _model(config, parameters)),
        ("adapters", _adapters(config, adapter_parameters)),
        *(model.described(_size(model.parameters)) for model in frozen),
        *input_lines(config, prompts),
        ("method", _method(config)),
        ("workers", _workers(config)),
        ("batch", _batch(config)),
        ("steps", _steps(config, prompts.data_sets)),
        ("schedule", _schedule(config)),
        ("limits", _limits(config)),
        ("turns", _turns(config)),
    ]
    return [(label, text) for label, text in lines if text]


def input_lines(config: RunConfig, prompts: PromptSets) -> list[tuple[str, str]]:
    """Describe what the run learns from: reward, data with remarks, chat template."""
    notes = [("note", note) for note in prompts.notes]
    data = [("" if n else "data", facts.describe()) for n, facts in enumerate(prompts.data_sets)]
    return [("reward", _reward(config)), *data, *notes, ("chat template", prompts.template)]


def _reward(config: RunConfig) -> str:
    """Name the function of the rewards, its signature and its arguments."""
    if config.environment is not None:
        return f"{_function(config.environment)}, an environment"
    if config.agent is not None:
        return f"{_function(config.agent)}, a program per response"
    reward = config.reward
    signature = reward_call("reward", reward.function, reward.args, reward.signature).signature
    theirs = "" if signature is RewardSignature.hybridrl else f", as {signature}'s"
    return f"{_function(reward)}{theirs}"


def _function(section: FunctionConfig) -> str:
    """Return a function with its arguments; of nested ones only the names."""
    args = [
        f"{name} {'/'.join(map(str, value)) if isinstance(value, dict) else value}"
        for name, value in section.args.items()
    ]
    return f"{section.function} ({shown(', '.join(args))})" if args else section.function


def _turns(config: RunConfig) -> str:
    environment = config.environment
    if environment is None:
        return ""
    ends = "".join(f" or {text!r}" for text in environment.stop)
    text = f"at most {environment.max_turns}, answered by {environment.function}"
    return f"{text}; each ends at the model's end token{ends}"


def count_text(number: float) -> str:
    """Format a count with three digits: 950, 5.12 k, 674 k, 7.62 B."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        # 999.6 k would round to "1e+03 k".
        if number >= 0.9995 * size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f}"


def evaluation_steps(total: int, every: int, *, first: bool = True) -> list[int]:
    """List the evaluated steps; 0, the `first` of all, is before training."""
    between = range(every, total, every) if every > 0 else ()
    return sorted({*([0] if first else []), *between, total})


def _model(config: RunConfig, parameters: int) -> str:
    train, rollout = config.fsdp.param_dtype.value, rollout_weights(config)
    dtypes = train if train == rollout else f"{train} (training), {rollout} (rollout)"
    weights = ", random weights" if config.model.init is Init.random else ""
    return f"{config.model.path}{_size(parameters)}{weights}, {dtypes}"


def _adapters(config: RunConfig, parameters: int) -> str:
    lora = config.lora
    if lora is None:
        return ""
    return (
        f"LoRA of rank {lora.rank}, alpha {lora.alpha:g}, on {', '.join(lora.target_modules)}: "
        f"{count_text(parameters)} parameters are trained"
    )


def _size(parameters: int) -> str:
    return f", {count_text(parameters)} parameters"


def _method(config: RunConfig) -> str:
    algorithm, lr = config.algorithm, config.actor.optim.lr
    if is_supervised(config):
        on = f"{targets_of(config)}, {_function(algorithm.loss)}"
        return f"supervised fine-tuning on {on}, lr {lr:g}"
    kl, loss, penalty = algorithm.kl, algorithm.loss, "no KL penalty"
    if kl.coef != 0:
        aim = "" if kl.target is None else f", moved towards {kl.target:g} nats a response"
        penalty = f"KL ({kl.estimator.value}) {kl.coef:g} in the {kl.placement.value}{aim}"
    if (teacher := config.teacher) is not None:
        penalty += f", teacher {teacher.objective.value} {teacher.coef:g}"
        penalty += f" and rewards {teacher.reward_coef:g}"
    settings = ", ".join(f"{name} {value}" for name, value in loss.args.items())
    return f"{algorithm.advantage} advantages, {loss.function} ({settings}), lr {lr:g}, {penalty}"


def _workers(config: RunConfig) -> str:
    num_ranks, tp = world_size(config), config.rollout.tensor_parallel_size
    engines = num_engines(config)
    nodes = f"{config.cluster.nodes} nodes, " if config.cluster.nodes > 1 else ""
    split = f", {training_ranks(config)} of them train" if engine_ranks(config) else ""
    return (
        f"{nodes}{num_ranks} rank{'s' if num_ranks != 1 else ''}{split} = dp_replicate "
        f"{config.fsdp.dp_replicate} x dp_shard {config.fsdp.dp_shard}; "
        f"{engines} vLLM engine{'s' if engines != 1 else ''} of tp {tp}"
    )


def _batch(config: RunConfig) -> str:
    prompts, repeats = config.data.prompts_per_step, config.rollout.responses_per_prompt
    responses, mini = prompts * repeats, config.actor.mini_batch_size
    updates, sharing = responses // mini * config.actor.epochs, config.fsdp.ulysses_size
    what = f"{prompts} prompts x {repeats} responses = {responses:,} a step"
    if is_supervised(config):
        what = f"{prompts} {targets_of(config)} a step"
    each = "a rank" if sharing == 1 else f"a group of {sharing} ranks"
    return (
        f"{what}; {updates} update"
        f"{'s' if updates != 1 else ''} of {mini} ({mini // data_shards(config)} {each})"
    )


def _steps(config: RunConfig, data_sets: list[DataSetSummary]) -> str:
    total = config.trainer.total_steps
    drawn = total * config.data.prompts_per_step
    passes = ", ".join(
        f"{drawn * facts.share / facts.train:.2g} passes over {facts.name or 'the data'}"
        for facts in data_sets
    )
    first, every = config.eval.before_training, config.eval.every_steps
    steps = evaluation_steps(total, every, first=first)
    listed = ", ".join(map(str, steps))
    when = f"at {listed}" if len(steps) <= MAX_STEPS_SHOWN else f"{len(steps)} times"
    epochs = config.trainer.epochs
    of_epochs = "" if epochs is None else f"trainer.epochs {epochs:g}, "
    return f"{total} ({of_epochs}{passes}); evaluated {when}"


def _schedule(config: RunConfig) -> str:
    rollout = config.rollout
    if rollout.schedule not in IN_PARTS:
        return ""
    age = f"no token is older than {rollout.max_versions} updates when it is trained"
    return f"{rollout.schedule.value}: up to {rollout.max_in_flight} prompts in flight; {age}"


def _limits(config: RunConfig) -> str:
    rollout = config.rollout
    top_p = f", top-p {rollout.top_p:g}" if rollout.top_p < 1 else ""
    return (
        f"prompts {rollout.max_prompt_tokens} and responses {rollout.max_response_tokens} tokens, "
        f"temperature {rollout.temperature:g}{top_p}"
    )
