"""Reference answers: as the chat template writes them, ended once, counted, and batched."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers

from hybridrl.config.choices import TooLongPrompts
from hybridrl.config.errors import ConfigError
from hybridrl.config.schema import ModelConfig
from hybridrl.data.sources.prompts import examine_prompts, load_prompts
from hybridrl.data.sources.tokenizer import load_tokenizer
from hybridrl.trainer.sft import reference_batch
from tests.support.data_configs import data_config, jsonl
from tests.support.role_configs import model_config
from tests.support.tokenizer_folders import TEMPLATE, model_folder

ANSWERS = ["two is 2", "it is three 3", "4"]
ROWS = [{"question": f"What is {i} ?", "answer": a, "short": "4"} for i, a in enumerate(ANSWERS)]
# As ChatML: an end token, and a newline that the model never writes.
ENDED = TEMPLATE.replace("message['content'] }}", "message['content'] + '<|end|>\\n' }}")


@pytest.fixture
def config(tmp_path):
    """Two training problems, one held out; a step draws one."""
    file = jsonl(tmp_path / "rows.jsonl", ROWS)
    return data_config(train_files=str(file), num_eval_problems=1, prompts_per_step=1)


def folder(path: Path, template: str | None = TEMPLATE) -> ModelConfig:
    texts = [*(row["question"] for row in ROWS), *ANSWERS, "\n", "The answer:4"]
    return model_config(model_folder(path / "model", texts, template))


def answers_of(config, model):
    tokenizer = load_tokenizer(model)
    sets = load_prompts(config, model, 50, max_answer_tokens=50)
    return [tokenizer.decode(prompt.answer_ids) for prompt in [*sets.train, *sets.held_out]]


@pytest.mark.parametrize("template", [TEMPLATE, ENDED, None])
def test_an_answer_ends_with_one_end_token(config, tmp_path, template):
    """Whether the template writes it, followed by a newline, or does not; or there is none."""
    found = answers_of(config, folder(tmp_path, template))
    assert found == [f"{answer}<|end|>" for answer in ANSWERS]


def test_an_answer_is_tokenised_as_behind_its_prompt(config, tmp_path):
    """Llama 2's tokenizer puts a space before a text by itself."""
    model = folder(tmp_path, None)
    chars = sorted({*json.dumps(ROWS), "\n"})
    plain = Tokenizer(models.BPE({text: k for k, text in enumerate(["<|end|>", "▁", *chars])}, []))
    plain.add_special_tokens(["<|end|>"])
    plain.normalizer, plain.decoder = normalizers.Prepend("▁"), decoders.Fuse()
    plain.save(f"{model.path}/tokenizer.json")
    assert answers_of(config, model) == [f"{answer}<|end|>" for answer in ANSWERS]


def test_what_the_template_adds_to_an_answer_is_trained_on(config, tmp_path):
    said = "('The answer:' if message['role'] == 'assistant' else '') + message['content']"
    template = TEMPLATE.replace("message['content'] }}", f"{said} }}}}")
    assert answers_of(config, folder(tmp_path, template))[2] == "The answer:4<|end|>"


def test_an_answer_keeps_the_thinking_that_the_template_drops(config, tmp_path):
    """Templates of reasoning models render earlier turns without it."""
    template = TEMPLATE.replace("message['content'] }}", "message['content'].split(' is ')[-1] }}")
    assert answers_of(config, folder(tmp_path, template)) == [f"{a}<|end|>" for a in ANSWERS]


def test_a_column_of_solutions_replaces_the_answers(config, tmp_path):
    model = folder(tmp_path)
    assert answers_of(replace(config, solution_key="short"), model) == ["4<|end|>"] * 3
    fault = examine_prompts(replace(config, solution_key="no"), model, 50, 50)[1][0]
    assert "data.solution_key = no" in fault and "question, answer, short" in fault


def test_an_empty_answer_is_named_with_its_line(config, tmp_path):
    rows = [ROWS[0] | {"answer": " "}, *ROWS[1:]]
    file = jsonl(tmp_path / "rows.jsonl", rows)
    (fault,) = examine_prompts(config, folder(tmp_path), 50, 50)[1]
    assert f"{file}:1: `answer` is empty" in fault


def test_too_long_answers_are_an_error_or_left_out_and_counted(config, tmp_path):
    """Of training problems; a held-out one stays."""
    model = folder(tmp_path)
    (fault,) = examine_prompts(config, model, 50, 4)[1]
    assert "rollout.max_response_tokens = 4, but 1 of 2 reference answers are longer" in fault
    assert "rows.jsonl:2: 5 tokens" in fault and "rollout.max_response_tokens=5" in fault
    dropping = replace(config, too_long_prompts=TooLongPrompts.drop)
    sets = load_prompts(dropping, model, 50, max_answer_tokens=4)
    assert [prompt.prompt_id for prompt in sets.train] == [0]
    assert sets.data_sets[0].left_out["with an answer longer than 4 tokens"] == 1
    assert sets.notes[-1] == ("training problems left out: 1 with an answer longer than 4 tokens")
    (fault,) = examine_prompts(dropping, model, 50, 1)[1]
    assert "there are 0 training problems" in fault


def test_a_model_without_an_end_token_is_refused(config, tmp_path):
    model = folder(tmp_path)
    file = Path(model.path) / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    del settings["eos_token"]
    file.write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match="has no end token"):
        load_prompts(config, model, 50, max_answer_tokens=50)
    assert load_prompts(config, model, 50).train[0].answer_ids == []


def test_tokens_of_answers_that_the_model_lacks_are_named(config, tmp_path):
    """Such as <think>, added to the tokenizer alone."""
    model = folder(tmp_path)
    prompts = load_prompts(config, model, 50, max_answer_tokens=50).train
    size = max(token for prompt in prompts for token in prompt.token_ids) + 1
    assert size <= max(token for prompt in prompts for token in prompt.answer_ids)
    (Path(model.path) / "config.json").write_text(json.dumps({"vocab_size": size}))
    (fault,) = examine_prompts(config, model, 50, 50)[1]
    assert "problems have tokens that the tokenizer has and the model lacks" in fault
    assert examine_prompts(config, model, 50)[1] == []


def test_only_answer_tokens_count_in_the_loss(config, tmp_path):
    prompts = load_prompts(config, folder(tmp_path), 50, max_answer_tokens=50).train
    batch = reference_batch(prompts)
    assert [row.tolist() for row in batch.responses.rows()] == [p.answer_ids for p in prompts]
    assert [row.tolist() for row in batch.prompts.rows()] == [p.token_ids for p in prompts]
    assert batch.counted.values.all() and len(batch.counted.values) == len(batch.responses.values)
