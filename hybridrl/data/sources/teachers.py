"""Teachers of a run's prompts: which one scores the responses, and a prompt of its own, if any.

A row's column `teacher` names its teacher, else its data set in data.mixture does. A column
`teacher_prompt` is what the teacher reads in place of the prompt, such as the question with a hint.
It is text in place of the question, or a list of chat messages.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from hybridrl.config.checks.frozen_models import TEACHERS, of_key, teacher_key
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
    student, options = load_tokenizer(config.model), config.data.chat_template_kwargs
    tokenizers = _tokenizers(config)
    is_own = teacher.tokenizer is TeacherTokenizer.own
    if is_own:
        _aligners(config, student, tokenizers)  # refuses tokenizers that it cannot read
    readers = tokenizers.values() if is_own else [student] * len(tokenizers)
    renderers = [Renderer(tokenizer, options) for tokenizer in readers]
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
    templates = {tokenizer.chat_template for tokenizer in tokenizers.values()}
    differs = not is_own and templates != {student.chat_template}
    measures = prompts.measures | {"data/teacher_template": float(differs)}
    return replace(prompts, train=assigned, measures=measures)


def aligners(config: RunConfig) -> list[Aligner]:
    """Return what reads the policy's responses in each teacher's own tokens.

    Raises:
        ConfigError: the bytes of a tokenizer's tokens are not known.
    """
    return _aligners(config, load_tokenizer(config.model), _tokenizers(config))


def _aligners(
    config: RunConfig,
    student: "PreTrainedTokenizerBase",
    tokenizers: Mapping[str, "PreTrainedTokenizerBase"],
) -> list[Aligner]:
    ends = stop_token_ids(plain_folder(config.model.path))
    return [
        Aligner(student, tokenizer, ends, _end_of_turn(config, name, tokenizer))
        for name, tokenizer in tokenizers.items()
    ]


def _end_of_turn(config: RunConfig, name: str, tokenizer: "PreTrainedTokenizerBase") -> int:
    """Return the token that ends an answer in a teacher's chat template."""
    options, asked = config.data.chat_template_kwargs, [{"role": "user", "content": "1 + 1"}]
    renderer = Renderer(tokenizer, options)
    try:
        answers = AnswerTokens(_model(config, name), tokenizer, options)
        prompt = renderer.render(asked)
        turn = answers.turn(asked, prompt, "2")
    except ConfigError as error:
        raise of_key(error, teacher_key(name)) from error
    except TemplateError as error:
        why = f"{teacher_key(name)}: its chat template refuses a question: {error}"
        raise ConfigError(why) from error
    return answers.encode(renderer.encode([prompt]), [turn])[0][-1]


def _tokenizers(config: RunConfig) -> dict[str, "PreTrainedTokenizerBase"]:
    """Load the tokenizers of the teachers, by name."""
    assert config.teacher is not None
    tokenizers = {}
    for name in config.teacher.paths:
        try:
            tokenizers[name] = load_tokenizer(_model(config, name))
        except ConfigError as error:
            raise of_key(error, teacher_key(name)) from error
    return tokenizers


def _model(config: RunConfig, name: str) -> ModelConfig:
    assert config.teacher is not None
    return replace(config.model, path=config.teacher.paths[name])


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
    if prompt.images is not None:
        raise ValueError("it has images, which a teacher sees among the policy's tokens alone")
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
