"""What teachers read: which one scores a prompt's responses, and a prompt of its own if it has one.

A row's column `teacher` names its teacher, else its data set in data.mixture does. A column
`teacher_prompt` is what the teacher reads in place of the prompt, such as the question with a hint.
It is text in place of the question, or a list of chat messages.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from jinja2 import TemplateError

from hybridrl.config.checks.frozen_models import TEACHERS
from hybridrl.config.choices import TeacherTokenizer
from hybridrl.config.errors import ConfigError
from hybridrl.config.schema import ModelConfig, RunConfig, TeacherConfig
from hybridrl.data.sources.alignment import Aligner
from hybridrl.data.sources.prompts import Prompt, PromptSets
from hybridrl.data.sources.rows import Message, first_faults
from hybridrl.data.sources.tokenizer import Renderer, load_tokenizer
from hybridrl.models.resolve import plain_folder
from hybridrl.models.vocabulary import stop_token_ids

NAME, READ = "teacher", "teacher_prompt"


def with_teachers(config: RunConfig, prompts: PromptSets) -> PromptSets:
    """Return the prompts with their teachers, and with what these read if it is something else.

    Raises:
        ConfigError: rows name no teacher, or have a teacher_prompt that cannot be read.
    """
    teacher = config.teacher
    if teacher is None:
        return prompts
    if teacher.tokenizer is TeacherTokenizer.own:
        aligners(config)  # refuses tokenizers that it cannot read
    renderers = [_renderer(config, teacher, path) for path in teacher.paths.values()]
    assigned, faults = list[Prompt](), list[str]()
    for prompt in prompts.train:
        try:
            index = _index(prompt, list(teacher.paths))
            if READ in prompt.example and config.agent is not None:
                raise ValueError(f"it has {READ}, but programs (agent) choose their own prompts")
            assigned.append(_assigned(prompt, index, renderers[index], config, teacher))
        except (ValueError, TemplateError) as fault:
            faults.append(f"{prompt.where}: {fault}")
    if faults:
        raise ConfigError(
            f"{TEACHERS} = {teacher.models}: {len(faults)} of {len(prompts.train)} rows cannot be "
            f"given to a teacher.\n{first_faults(faults)}\nCorrect the columns `{NAME}` and "
            f"`{READ}`, or name teachers by the data sets of data.mixture."
        )
    own = load_tokenizer(config.model).chat_template
    differs = teacher.tokenizer is TeacherTokenizer.student and any(
        load_tokenizer(_model(config, path)).chat_template != own for path in teacher.paths.values()
    )
    measures = prompts.measures | {"data/teacher_template": float(differs)}
    return replace(prompts, train=assigned, measures=measures)


def aligners(config: RunConfig) -> list[Aligner]:
    """Return what reads the policy's responses in each teacher's own tokens.

    Raises:
        ConfigError: the bytes of a tokenizer's tokens are not known.
    """
    teacher = config.teacher
    assert teacher is not None
    student = load_tokenizer(config.model)
    ends = stop_token_ids(plain_folder(config.model.path))
    others = [load_tokenizer(_model(config, path)) for path in teacher.paths.values()]
    return [Aligner(student, other, ends, int(other.eos_token_id)) for other in others]


def _renderer(config: RunConfig, teacher: TeacherConfig, path: str) -> Renderer:
    is_own = teacher.tokenizer is TeacherTokenizer.own
    model = _model(config, path) if is_own else config.model
    return Renderer(load_tokenizer(model), config.data.chat_template_kwargs)


def _model(config: RunConfig, path: str) -> ModelConfig:
    return replace(config.model, path=path, trust_remote_code=False)


def _index(prompt: Prompt, names: Sequence[str]) -> int:
    """Return the teacher of a prompt; ValueError if none is named."""
    if len(names) == 1:
        return 0
    name = prompt.example.get(NAME) or prompt.dataset
    if name not in names:
        raise ValueError(f"{NAME} = {name!r}, expected one of {', '.join(names)}")
    return names.index(name)


def _assigned(
    prompt: Prompt, index: int, renderer: Renderer, config: RunConfig, teacher: TeacherConfig
) -> Prompt:
    """Return a prompt with its teacher, and the tokens that this one reads if they are others."""
    messages = _messages(prompt)
    if messages is None and teacher.tokenizer is TeacherTokenizer.student:
        return replace(prompt, teacher=index)
    (ids,) = renderer.encode([renderer.render(messages or prompt.messages)])
    limit = config.rollout.max_prompt_tokens
    if len(ids) > limit:
        raise ValueError(
            f"its teacher reads {len(ids)} tokens, and rollout.max_prompt_tokens = {limit}"
        )
    return replace(prompt, teacher=index, teacher_ids=ids)


def _messages(prompt: Prompt) -> list[Message] | None:
    """Return the messages of `teacher_prompt`; None without; ValueError if it is something else."""
    read: Any = prompt.example.get(READ)
    if read is None:
        return None
    if isinstance(read, str) and read:
        return [*prompt.messages[:-1], {"role": "user", "content": read}]
    if isinstance(read, list) and read and all(isinstance(m, Mapping) for m in read):
        return [{name: str(text) for name, text in message.items()} for message in read]
    raise ValueError(f"{READ} = {read!r}, expected text or a list of chat messages")
