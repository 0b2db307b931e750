"""What teachers read: which one scores a prompt's responses, and a prompt of its own if it has one.

A row's column `teacher` names its teacher, else its data set in data.mixture does. A column
`teacher_prompt` is what the teacher reads in place of the prompt, such as the question with a hint.
It is text in place of the question, or a list of chat messages.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from hybridrl.config.checks.frozen_models import TEACHERS, of_key
from hybridrl.config.choices import TeacherTokenizer
from hybridrl.config.errors import ConfigError
from hybridrl.config.schema import ModelConfig, RunConfig, TeacherConfig
from hybridrl.data.sources.alignment import Aligner
from hybridrl.data.sources.prompts import Prompt, PromptSets
from hybridrl.data.sources.rows import Message, first_faults
from hybridrl.data.sources.tokenizer import Renderer, load_tokenizer
from hybridrl.data.sources.turns import AnswerTokens
from hybridrl.models.resolve import plain_folder
from hybridrl.models.vocabulary import stop_token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
    renderers = [_renderer(config, teacher, name) for name in teacher.paths]
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
            f"`{READ}`, name teachers by the data sets of data.mixture, or raise "
            f"rollout.max_prompt_tokens."
        )
    own = load_tokenizer(config.model).chat_template
    differs = teacher.tokenizer is TeacherTokenizer.student and any(
        _tokenizer(config, name).chat_template != own for name in teacher.paths
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
    return [
        Aligner(student, _tokenizer(config, name), ends, _end_of_turn(config, name))
        for name in teacher.paths
    ]


def _end_of_turn(config: RunConfig, name: str) -> int:
    """Return the token that ends an answer in a teacher's chat template."""
    assert config.teacher is not None
    options, tokenizer = config.data.chat_template_kwargs, _tokenizer(config, name)
    renderer = Renderer(tokenizer, options)
    answers = AnswerTokens(_model(config, config.teacher.paths[name]), tokenizer, options)
    asked = [{"role": "user", "content": "1 + 1"}]
    try:
        prompt = renderer.render(asked)
        turn = answers.turn(asked, prompt, "2")
    except TemplateError as error:
        raise ConfigError(f"{_key(name)}: its chat template refuses a question: {error}") from error
    return answers.encode(renderer.encode([prompt]), [turn])[0][-1]


def _key(name: str) -> str:
    return f"{TEACHERS}.{name}".rstrip(".")


def _tokenizer(config: RunConfig, name: str) -> "PreTrainedTokenizerBase":
    """Load the tokenizer of a teacher."""
    assert config.teacher is not None
    try:
        return load_tokenizer(_model(config, config.teacher.paths[name]))
    except ConfigError as error:
        raise ConfigError(*(of_key(problem, _key(name)) for problem in error.problems)) from error


def _renderer(config: RunConfig, teacher: TeacherConfig, name: str) -> Renderer:
    is_own = teacher.tokenizer is TeacherTokenizer.own
    tokenizer = _tokenizer(config, name) if is_own else load_tokenizer(config.model)
    return Renderer(tokenizer, config.data.chat_template_kwargs)


def _model(config: RunConfig, path: str) -> ModelConfig:
    return replace(config.model, path=path)


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
