"""Checks of teachers: their paths, and settings of a run that an objective cannot have."""

from collections.abc import Iterator, Mapping

from hybridrl.config.checks.frozen_models import TEACHERS
from hybridrl.config.choices import Schedule, TeacherObjective, TeacherTokenizer
from hybridrl.config.errors import Problem, must_be
from hybridrl.config.estimators import uses_critic
from hybridrl.config.schema import RunConfig

OBJECTIVE = "teacher.objective"


def teacher_problems(config: RunConfig) -> Iterator[Problem]:
    """Find what keeps a run from learning from its teachers."""
    teacher = config.teacher
    if teacher is None:
        return
    models = teacher.models
    named = isinstance(models, Mapping) and models and all(map(_is_path, models.values()))
    if not (_is_path(models) or named):
        expected = "a path, or a path for each name, {math: ..., code: ...}"
        remedy = f"Set {TEACHERS}=<a folder, the directory of a run, or a name on the hub>"
        yield Problem("teacher_models", TEACHERS, models, expected, remedy=remedy)
    if not teacher.coef and not teacher.reward_coef:
        why = "with teacher.reward_coef = 0, too, nothing would be learned"
        yield Problem("teacher_coef", "teacher.coef", 0.0, "above 0", why, "Set teacher.coef=1")
    if teacher.tokenizer is TeacherTokenizer.own:
        yield from _own_tokens(config, teacher.objective)
    if not teacher.is_sampled:
        yield from _whole_vocabulary(config, teacher.objective)
    if teacher.given_fraction > 0:
        yield from _given_answers(config, teacher.given_fraction)


def _is_path(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _own_tokens(config: RunConfig, objective: TeacherObjective) -> Iterator[Problem]:
    own = "teacher.tokenizer = own"
    if objective is not TeacherObjective.sampled:
        why = f"{own}: two vocabularies have no divergence, only log-probs of pieces of text"
        yield must_be("teacher_tokens", OBJECTIVE, objective, "sampled", why)
    if config.rollout.top_p < 1:
        why = f"{own}: the teacher's probabilities of pieces of text are not cut to the kept tokens"
        yield must_be("teacher_tokens", "rollout.top_p", config.rollout.top_p, 1, why)
    for key in ("environment", "agent"):
        if vars(config)[key] is not None:
            why = f"{own}: only a response of one turn is read in other tokens"
            yield Problem("teacher_tokens", key, "set", "none", why, "Set environment=none")


def _whole_vocabulary(config: RunConfig, objective: TeacherObjective) -> Iterator[Problem]:
    over = f"{OBJECTIVE} = {objective}, whose teacher"
    for key, value, needed, why in (
        ("actor.epochs", config.actor.epochs, 1, "keeps its states of one order of the responses"),
        ("fsdp.ulysses_size", config.fsdp.ulysses_size, 1, "has the states of whole sequences"),
        ("rollout.top_p", config.rollout.top_p, 1, "is compared over all tokens"),
    ):
        if value != needed:
            other = f", or {OBJECTIVE}=sampled"
            yield must_be("teacher_objective", key, value, needed, f"{over} {why}", other)


def _given_answers(config: RunConfig, fraction: float) -> Iterator[Problem]:
    why = f"teacher.given_fraction = {fraction:g}: given answers are not sampled"
    sync, more = Schedule.sync, ", or teacher.given_fraction=0"
    for key, value, needed in (
        ("rollout.schedule", config.rollout.schedule, sync),
        ("rollout.exact", config.rollout.exact, False),
        ("algorithm.kl.coef", config.algorithm.kl.coef, 0),
    ):
        if value != needed:
            yield must_be("given_answers", key, value, str(needed).lower(), why, more)
    if uses_critic(config):
        advantage, remedy = config.algorithm.advantage, f"Set algorithm=grpo{more}"
        expected = "one without a critic"
        yield Problem("given_answers", "algorithm.advantage", advantage, expected, why, remedy)
