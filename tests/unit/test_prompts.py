"""Prompts: chat template, stable ids, lengths."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from hybridrl.agents.text import ModelText
from hybridrl.config.choices import Repeated, TooLongPrompts
from hybridrl.config.errors import ConfigError
from hybridrl.config.sections import DataConfig
from hybridrl.data.sources.prompts import examine_prompts, load_prompts
from hybridrl.data.sources.tokenizer import decoder, load_tokenizer
from hybridrl.data.sources.turns import TurnTokens
from tests.support.data_configs import data_config, jsonl
from tests.support.role_configs import model_config
from tests.support.tokenizer_folders import TEMPLATE, model_folder

QUESTIONS = [f"What is {'1 + ' * i}1 ?" for i in range(12)]


@pytest.fixture
def config(tmp_path) -> DataConfig:
    """Twelve problems, each two words longer than the one before; the last two are held out."""
    path = tmp_path / "sums.jsonl"
    rows = [{"question": text, "answer": f"#### {i + 1}"} for i, text in enumerate(QUESTIONS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return data_config(train_files=str(path), num_eval_problems=2)


@pytest.fixture
def model(tmp_path):
    return model_config(model_folder(tmp_path / "model", [*QUESTIONS, "Be brief."]))


def problems_of(*args):
    prompts, problems = examine_prompts(*args)
    assert (prompts is None) == bool(problems)
    return problems


def test_prompts_are_rendered_by_the_chat_template(config, model):
    sets = load_prompts(replace(config, system_prompt="Be brief."), model, 100)
    first = sets.train[0]
    assert first.text == "<|system|>Be brief.<|user|>What is 1 ?<|assistant|>"
    assert first.question == "What is 1 ?"
    assert first.example["answer"] == "#### 1"
    assert first.example["dataset"] == Path(config.train_files).stem
    tokenizer = load_tokenizer(model)
    assert tokenizer.decode(first.token_ids, skip_special_tokens=False) == first.text
    assert tokenizer.unk_token_id not in first.token_ids
    # system + 2 words + user + 4 words + assistant
    assert len(first.token_ids) == 9


def test_ids_are_stable_and_held_out_prompts_have_their_own(config, model):
    sets = load_prompts(config, model, 100)
    assert [prompt.prompt_id for prompt in sets.train] == list(range(10))
    assert [prompt.prompt_id for prompt in sets.held_out] == [10, 11]
    dropped = load_prompts(replace(config, too_long_prompts=TooLongPrompts.drop), model, 27)
    assert [p.prompt_id for p in dropped.held_out] == [10]


def test_tokenizer_without_template_gets_plain_text(config, tmp_path, caplog):
    folder = model_folder(tmp_path / "plain", QUESTIONS, template=None)
    sets = load_prompts(config, model_config(folder), 100)
    assert sets.train[0].text == "What is 1 ?\n"
    assert "no chat template" in caplog.text


@pytest.mark.parametrize("template", [TEMPLATE, None])
def test_a_last_message_of_the_assistant_begins_the_answer(tmp_path, template):
    """It is no turn of its own, in prompts and in reference answers."""
    folder = model_folder(tmp_path / "model", ["What is", "It", "\nIt is 1 ."], template)
    chat = [{"role": "user", "content": "What is"}, {"role": "assistant", "content": "It is"}]
    rows = [{"question": chat, "answer": " 1 ."}] * 8
    config = data_config(train_files=str(jsonl(tmp_path / "a.jsonl", rows)), prompts_per_step=1)
    config = replace(config, held_out_overlap=Repeated.keep)
    (first, *_) = load_prompts(config, model_config(folder), 100, max_answer_tokens=9).train
    begin = "<|user|>What is<|assistant|>It is" if template else "What is\nIt is"
    decode = load_tokenizer(model_config(folder)).decode
    assert first.text == begin == decode(first.token_ids)
    assert decode(first.answer_ids) == " 1 .<|end|>"


MOODY = TEMPLATE + "{%- if add_generation_prompt and mood -%}{{ mood }}{%- endif -%}"


def test_the_chat_template_gets_further_arguments_everywhere(config, tmp_path):
    """Prompts, what follows a turn, and agents' requests, which may have their own."""
    folder = model_folder(tmp_path / "moody", [*QUESTIONS, "Calm"], template=MOODY)
    calm = replace(config, chat_template_kwargs={"mood": "Calm"})
    (first, *_), tokenizer = (
        load_prompts(calm, model_config(folder), 100).train,
        load_tokenizer(model_config(folder)),
    )
    assert first.text == "<|user|>What is 1 ?<|assistant|>Calm"
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    options = calm.chat_template_kwargs
    text = ModelText(tokenizer, [end], options)
    asked = [{"role": "user", "content": "What"}]
    assert text.render(asked) == "<|user|>What<|assistant|>Calm"
    assert text.render(asked, mood="Wild") == "<|user|>What<|assistant|>Wild"
    turns = MOODY.replace("+ message['content']", "+ message['content'] + '<|end|>'")
    tokenizer.chat_template = turns
    (ids,) = TurnTokens(tokenizer, [end], (), "user", options).answers(["What"], [end])
    assert tokenizer.decode(ids) == "<|user|>What<|end|><|assistant|>Calm"


def test_an_argument_that_the_chat_template_does_not_read_is_refused(config, model):
    (problem,) = problems_of(replace(config, chat_template_kwargs={"moo": 1}), model, 100)
    assert problem.startswith("data.chat_template_kwargs.moo has no effect")


@pytest.mark.parametrize(("known", "is_said"), [(QUESTIONS, False), (QUESTIONS[:1], True)])
def test_text_that_the_tokenizer_does_not_know_is_reported(config, tmp_path, known, is_said):
    """A word of twelve is unknown in each prompt but the first; the file's line is named."""
    folder = model_folder(tmp_path / "model", known)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(
        json.dumps(settings | {"unk_token": "<|unknown|>"})
    )
    sets = load_prompts(config, model_config(folder), 100)
    assert sets.template == "the tokenizer's own"
    assert (sets.measures["data/unknown_fraction"] > 0.01) == is_said
    assert (
        "' +' in" in (text := sets.details["unknown_tokens"]()) and "sums.jsonl:" in text
    ) == is_said


def test_chat_messages_are_taken_as_they_are(config, model, tmp_path):
    messages = [
        {"role": "user", "content": "What is 1 ?"},
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": "Be brief."},
    ]
    path = Path(config.train_files)
    path.write_text((json.dumps({"question": messages, "answer": 1}) + "\n") * 12)
    config = replace(config, held_out_overlap=Repeated.keep)
    sets = load_prompts(config, model, 100)
    expected = "<|user|>What is 1 ?<|assistant|>1<|user|>Be brief.<|assistant|>"
    assert sets.train[0].text == expected
    assert sets.train[0].question == "Be brief."
    problems = problems_of(replace(config, system_prompt="x"), model, 100)
    assert len(problems) == 1
    assert "data.system_prompt = 'x' has no effect" in problems[0]


def test_what_the_template_refuses_is_named_with_its_line(config, model):
    lines = Path(config.train_files).read_text().splitlines()
    lines[2] = json.dumps({"question": [{"role": "tool", "content": "x"}], "answer": "1"})
    Path(config.train_files).write_text("\n".join(lines))
    problems = problems_of(config, model, 100)
    assert len(problems) == 1
    assert f"{config.train_files}:3: unknown role tool" in problems[0]


def test_tokens_that_the_model_lacks_are_named(config, tmp_path):
    """Others of the tokenizer, which no prompt has, are no problem: Gemma 3 has one for images."""
    model = model_config(model_folder(tmp_path / "model", [*QUESTIONS, "image"]))
    ids = [token for prompt in load_prompts(config, model, 100).train for token in prompt.token_ids]
    file = Path(model.path) / "config.json"
    file.write_text(json.dumps({"vocab_size": max(ids)}))
    (problem,) = problems_of(config, model, 100)
    assert "12 of 12 problems have tokens" in problem and f"such as {max(ids)} (" in problem
    assert f"{config.train_files}:1: config.json has vocab_size = {max(ids)}." in problem
    file.write_text(json.dumps({"vocab_size": max(ids) + 1}))
    assert problems_of(config, model, 100) == []


def test_too_long_prompts_are_an_error_with_line_length_and_limit(config, model):
    # Question i has 4 + 2 i words, the template adds 2 tokens; of the training problems 0 to 9
    # those from 7 on (20 tokens) exceed 19, and both held-out ones (26 and 28) do.
    problems = problems_of(config, model, 19)
    assert len(problems) == 2
    assert "rollout.max_prompt_tokens = 19" in problems[0]
    assert "3 of 10 prompts" in problems[0]
    assert f"{config.train_files}:8: 20 tokens" in problems[0]
    assert "rollout.max_prompt_tokens=24" in problems[0]
    assert "rollout.max_prompt_tokens=28" in problems[1]
    assert problems_of(config, model, 28) == []


def test_too_long_prompts_can_be_dropped_and_are_counted(config, model):
    sets = load_prompts(replace(config, too_long_prompts=TooLongPrompts.drop), model, 26)
    assert (len(sets.train), len(sets.held_out)) == (10, 1)
    assert sets.notes[-1] == "held-out problems left out: 1 longer than 26 tokens"
    assert sets.data_sets[0].held_out_left_out == {"longer than 26 tokens": 1}


def test_dropping_nearly_all_is_an_error(config, model):
    problems = problems_of(replace(config, too_long_prompts=TooLongPrompts.drop), model, 8)
    assert len(problems) == 2
    # Of the ten the first two have no more than 8 tokens.
    assert "2 training problems (left out: 8 longer than 8 tokens)" in problems[0]
    assert "no held-out prompt" in problems[1]


def test_missing_model_and_missing_file_are_problems_not_crashes(config, tmp_path):
    assert "no such file" in problems_of(replace(config, train_files="none.jsonl"), "x", 9)[0]
    problems = problems_of(config, model_config(tmp_path / "no_model"), 9)
    assert len(problems) == 1
    assert "model.path" in problems[0]


@pytest.mark.parametrize("content", [None, '{"version": "1.0"}', '{"model": '])
def test_folder_without_a_whole_tokenizer_is_a_config_error(tmp_path, content):
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError, match="tokenizer cannot be loaded"):
        load_tokenizer(model_config(tmp_path))


@pytest.mark.parametrize("length", ["x", True, [1]])
def test_a_longest_length_that_is_no_number_is_named(model, length):
    file = Path(model.path, "tokenizer_config.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_max_length": length}))
    with pytest.raises(ConfigError, match=r"model_max_length = .*, expected a number"):
        load_tokenizer(model)


def test_decoding_leaves_special_tokens_out(model):
    tokenizer = load_tokenizer(model)
    row = tokenizer("What is 1 ?<|end|>")["input_ids"]
    assert decoder(tokenizer)([row, []]) == ["What is 1 ?", ""]
