"""Checks of the frozen models beside the policy, the reward model and teachers: heads and sizes.

Their input is the policy's token ids, in the packed micro-batches of the policy's update.
models/vocabulary.py compares the vocabularies.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from hybridrl.config.checks.algorithm import forward_problems, layer_sharing_problems
from hybridrl.config.checks.sizes import length_problems, sequence_head_problems
from hybridrl.config.choices import Init, TeacherTokenizer
from hybridrl.config.errors import ConfigError, Problem
from hybridrl.config.planner.model_shape import model_shape
from hybridrl.config.planner.shape import FrozenModel, ModelShape, NamedModel
from hybridrl.config.schema import RunConfig

REWARD_MODEL_PATH = "reward_model.model.path"
TEACHERS = "teacher.models"
# Suffix of transformers' classes with a classification head.
ARCHITECTURE = "ForSequenceClassification"
# Default of transformers if config.json names no labels.
DEFAULT_LABELS = 2
OTHER_WAYS = (
    ". Or score the text instead, by a reward function of your own (reward.function) or a server "
    "(reward=http)"
)
OWN_TOKENS = (
    ". Or let it read the text in its own tokens: teacher.tokenizer=own teacher.objective=sampled"
)

ReadModel = Callable[[str], dict[str, Any]]


def named_models(config: RunConfig) -> list[NamedModel]:
    """Return the frozen models that a config names."""
    named = []
    if (reward := config.reward_model) is not None:
        path, weight = reward.model.path, reward.weight
        named.append(
            NamedModel(
                name="reward_model", key=REWARD_MODEL_PATH, path=path, has_head=False, weight=weight
            )
        )
    if (teacher := config.teacher) is not None:
        named += [
            NamedModel(
                name=f"teacher {name}".strip(),
                key=teacher_key(name),
                path=path,
                has_head=True,
                has_weights=teacher.init is Init.pretrained,
                own_tokens=teacher.tokenizer is TeacherTokenizer.own,
            )
            for name, path in teacher.paths.items()
        ]
    return named


def teacher_key(name: str) -> str:
    """Return the config key of a teacher's path; the only teacher may have no name."""
    return f"{TEACHERS}.{name}" if name else TEACHERS


def frozen_model(model: NamedModel, read_model: ReadModel) -> FrozenModel:
    """Return a frozen model with its sizes; `read_model` gives its config.json.

    Raises:
        ConfigError: the model cannot be read, or its head is not that of its role.
    """
    try:
        if model.has_head:
            return FrozenModel(**vars(model), shape=policy_shape(model.path, read_model))
        config = read_model(model.path)
        shape = model_shape(config)
    except ConfigError as error:
        raise of_key(error, model.key) from error
    if problem := _head_problem(model.path, config):
        raise ConfigError(problem)
    return FrozenModel(**vars(model), shape=shape)


def policy_shape(path: str, read_model: ReadModel) -> ModelShape:
    """Return the sizes of a language model; `read_model` gives its config.json.

    Raises:
        ConfigError: the model cannot be read, is not supported, or is a reward model.
    """
    config = read_model(path)
    for name in config.get("architectures") or []:
        if str(name).endswith(ARCHITECTURE):
            why = f"a {name} has no language-modelling head"
            remedy = f"Set model.path to the policy. A reward model is {REWARD_MODEL_PATH}"
            expected = "a language model"
            raise ConfigError(Problem("classifier", "model.path", path, expected, why, remedy))
    return model_shape(config)


def of_key(error: ConfigError, key: str) -> ConfigError:
    """Return the problems of model.path as those of another model's path."""
    return ConfigError(*(_of_key(problem, key) for problem in error.problems))


def _of_key(problem: Problem, key: str) -> Problem:
    texts = {name: text for name, text in vars(problem).items() if isinstance(text, str)}
    embedded = "model=embedded, the tiny model that comes with hybridrl"
    for name, text in texts.items():
        own = text.replace("model.path", key)
        texts[name] = own.replace(embedded, f"{key.partition('.')[0]}=none")
    return replace(problem, **texts)


def path_problem(id_: str, key: str, path: str, expected: str, why: str, model: str) -> Problem:
    """Return the problem of a frozen model's path, whose remedy is another `model`."""
    remedy = f"Set {key}=<{model}>{OTHER_WAYS if key == REWARD_MODEL_PATH else OWN_TOKENS}"
    return Problem(id_, key, path, expected, why, remedy)


def _head_problem(path: str, config: Mapping[str, Any]) -> Problem | None:
    """Return the problem of a checkpoint without a head with one output."""
    names, key = config.get("architectures") or [], REWARD_MODEL_PATH
    if not any(str(name).endswith(ARCHITECTURE) for name in names):
        expected = f"a class that ends in {ARCHITECTURE}, whose score head gives the reward"
        why = f"it is a {' or '.join(map(str, names)) or 'model without a class'}"
        return path_problem("reward_head", key, path, expected, why, "such a checkpoint")
    labels, number = config.get("id2label"), config.get("num_labels", DEFAULT_LABELS)
    if isinstance(labels, Mapping):
        number = len(labels)
    if number == 1:
        return None
    expected, why = "1 label, whose score is the reward", f"it has {number} labels"
    other = "a checkpoint with num_labels = 1"
    return path_problem("reward_labels", key, path, expected, why, other)


def frozen_shape_problems(
    config: RunConfig, policy: ModelShape, model: FrozenModel
) -> Iterator[Problem]:
    """Check length and attention heads of a frozen model, and that it embeds the policy's ids.

    A teacher's vocabulary is compared token by token: what pads it may differ.
    """
    shape = model.shape
    if shape.vocab < policy.vocab and not model.has_head:
        expected = f"at least the policy's {policy.vocab:,} token ids, which are its input"
        why, other = f"it has {shape.vocab:,}", "a model with the policy's vocabulary"
        yield path_problem("reward_vocabulary", model.key, model.path, expected, why, other)
    owner = f"{model.key} = {model.path}"
    yield from length_problems(config, shape, owner)
    yield from sequence_head_problems(config, shape, owner)
    yield from forward_problems(config, shape, owner)
    yield from layer_sharing_problems(config, shape, owner)
