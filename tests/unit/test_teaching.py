"""Teachers in a step: which one reads what, advantages with their part, metrics, faults of rows."""

import json
from dataclasses import replace

import pytest
import torch

from hybridrl.config.choices import Repeated, TeacherTokenizer
from hybridrl.config.errors import ConfigError
from hybridrl.data.batch import RolloutBatch
from hybridrl.data.ragged import Ragged
from hybridrl.data.sources.prompts import load_prompts
from hybridrl.data.sources.teachers import with_teachers
from hybridrl.trainer.errors import RunStopped
from hybridrl.trainer.sft import GivenAnswers
from hybridrl.trainer.teaching import (
    OtherTokens,
    taught_advantages,
    teacher_fields,
    teacher_metrics,
    unsampled,
)
from tests.support.byte_tokenizers import END, byte_level
from tests.support.data_configs import data_config
from tests.support.role_configs import fsdp_config, model_config, teacher_config
from tests.support.run_configs import run_config
from tests.support.tokenizer_folders import model_folder

TEXTS = ["What is 1 ?", "What is 2 ?", "Hint : it is 2 . What is 2 ?"]
SPEC = fsdp_config(dp_shard=1)


def loaded(tmp_path, rows, models="/t", **changes):
    """Config and prompts of rows that are trained on, the last one held out."""
    path = tmp_path / "rows.jsonl"
    both = [{"question": TEXTS[0], "answer": "#### 1"} | row for row in [*rows, {}]]
    path.write_text("".join(json.dumps(row) + "\n" for row in both))
    model = model_config(model_folder(tmp_path / "model", TEXTS))
    data = data_config(
        train_files=str(path),
        num_eval_problems=1,
        prompts_per_step=1,
        held_out_overlap=Repeated.keep,
    )
    models = model.path if models == "/t" else dict.fromkeys(models, model.path)
    teacher = teacher_config(models, SPEC, **changes)
    config = replace(run_config(), data=data, model=model, teacher=teacher)
    return config, load_prompts(data, model, config.rollout.max_prompt_tokens)


def test_a_row_names_its_teacher_and_what_this_one_reads(tmp_path):
    rows = [
        {"teacher": "code"},
        {"teacher": "math", "question": TEXTS[1], "teacher_prompt": TEXTS[2]},
        {"teacher": "math", "teacher_prompt": [{"role": "user", "content": TEXTS[1]}]},
    ]
    config, prompts = loaded(tmp_path, rows, models=("math", "code"))
    assigned = with_teachers(config, prompts)
    assert [prompt.teacher for prompt in assigned.train] == [1, 0, 0]
    plain, hinted, other = assigned.train
    assert plain.teacher_ids == []
    assert len(hinted.teacher_ids) > len(hinted.token_ids)
    assert other.teacher_ids == hinted.token_ids  # the same question in the same template
    assert assigned.measures["data/teacher_template"] == 0
    fields = teacher_fields(config.teacher, assigned.train)
    assert fields["teacher"].tolist() == [1, 0, 0]
    assert [row.tolist() for row in fields["teacher_prompts"].rows()] == [
        plain.token_ids,
        hinted.teacher_ids,
        other.teacher_ids,
    ]


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"teacher": "art"}, "teacher = 'art', expected one of math, code"),
        ({}, "teacher = '', expected one of math, code"),
        ({"teacher": "math", "teacher_prompt": 3}, "teacher_prompt = 3, expected text"),
        ({"teacher": "math", "teacher_prompt": "What " * 200}, "reads 20"),
    ],
)
def test_a_row_that_no_teacher_can_read_is_named(row, text, tmp_path):
    config, prompts = loaded(tmp_path, [{"teacher": "code"}, row], models=("math", "code"))
    with pytest.raises(ConfigError) as caught:
        with_teachers(config, prompts)
    assert text in str(caught.value) and "rows.jsonl:2" in str(caught.value)
    assert "1 of 2 rows" in str(caught.value)


def batch_of(old, teacher, scores, groups):
    """Responses of two tokens each, an outcome on the last."""
    lengths = torch.full((len(groups),), 2)

    def ragged(values, dtype=torch.float32):
        return Ragged(torch.tensor(values, dtype=dtype), lengths)

    count = 2 * len(groups)
    return RolloutBatch(
        prompts=ragged([0] * count, torch.int32),
        responses=ragged([0] * count, torch.int32),
        response_mask=ragged([True] * (count - 1) + [False], torch.bool),
        rollout_log_probs=ragged(old),
        group_id=torch.tensor(groups),
        weight_version=torch.zeros(len(groups), dtype=torch.int64),
        truncated=torch.zeros(len(groups), dtype=torch.bool),
        added={
            "old_log_probs": ragged(old),
            "teacher_log_probs": ragged(teacher),
            "scores": ragged([x for score in scores for x in (0.0, score)]),
        },
    )


def test_metrics_are_of_the_sampled_tokens():
    """The teacher prefers the first response of group 0; group 1 has equal rewards."""
    old = [-1.0] * 8
    teacher = [-0.5, -0.5, -2.0, -2.0, -3.0, -1.0, -1.0, 99.0]
    batch = batch_of(old, teacher, [1.0, 0.0, 0.1, 0.1], [0, 0, 1, 1])
    metrics = teacher_metrics(batch, step=1)
    assert metrics["teacher/kl"] == pytest.approx((-0.5 - 0.5 + 1 + 1 + 2 + 0 + 0) / 7)
    assert metrics["teacher/log_ratio_max"] == 2.0
    assert metrics["teacher/preference"] == pytest.approx(0.5 + 1.0)
    equal = batch_of(old, old, [1.0] * 4, [0, 0, 1, 1])
    assert teacher_metrics(equal, step=1) == {
        "teacher/kl": 0.0,
        "teacher/log_ratio_max": 0.0,
        "teacher/preference": None,
    }
    broken = batch_of(old, [float("nan")] * 8, [1.0] * 4, [0, 0, 1, 1])
    with pytest.raises(RunStopped, match="step 3: the teacher's log-probs of 7 tokens"):
        teacher_metrics(broken, step=3)


def test_advantages_have_the_teachers_part_unless_the_loss_has_it():
    batch = batch_of([-1.0] * 4, [-0.5, -2.0, -1.0, 99.0], [1.0, 0.0], [0, 0])
    own = batch.responses.like(torch.tensor([1.0, 1.0, -1.0, -1.0]))
    sampled = teacher_config("/t", SPEC, coef=2.0, reward_coef=0.5)
    assert taught_advantages(sampled, batch, own).values.tolist() == [1.5, -1.5, -0.5, 0.0]
    whole = replace(sampled, objective="reverse_kl")
    assert taught_advantages(whole, batch, own).values.tolist() == [0.5, 0.5, -0.5, 0.0]


def test_given_answers_are_due_in_their_share_of_the_steps():
    teacher = teacher_config("/t", SPEC, given_fraction=0.3)
    config = replace(run_config(), teacher=teacher)
    given = GivenAnswers(config, None, None, None)
    due = [given.are_due(step) for step in range(1, 1001)]
    assert 250 < sum(due) < 350
    assert due == [given.are_due(step) for step in range(1, 1001)]
    none = GivenAnswers(replace(config, teacher=None), None, None, None)
    assert not any(none.are_due(step) for step in range(100))


def test_other_tokens_get_the_teachers_sums(tmp_path):
    """The text of a response, its end in both; ids that are no text alone teach nothing."""
    tokenizers = {"student": byte_level(300), "teacher": byte_level(420)}
    for name, tokenizer in tokenizers.items():
        tokenizer.save_pretrained(tmp_path / name)
        (tmp_path / name / "config.json").write_text("{}")
    teacher = teacher_config(str(tmp_path / "teacher"), SPEC, tokenizer=TeacherTokenizer.own)
    model = model_config(tmp_path / "student")
    tokens = OtherTokens(replace(run_config(), model=model, teacher=teacher))
    end = tokenizers["student"].eos_token_id
    text = "The unbelievable cat sat."
    ids = [[*tokenizers["student"].encode(text), end], [end, 5]]
    responses = Ragged.from_rows(ids, torch.int32)
    prompts = Ragged.from_rows([[1, 2], [3]], torch.int32)
    batch = unsampled(prompts, responses, torch.arange(2)).adding(teacher_prompts=prompts)
    read, spans = tokens.read(batch)
    assert tokenizers["teacher"].decode(read.responses.rows()[0]) == text + END
    assert len(read.responses.rows()[0]) < len(ids[0])
    old, log_q = (
        rows.like(-torch.rand(len(rows.values), generator=torch.Generator().manual_seed(k)))
        for k, rows in enumerate((responses, read.responses))
    )
    spread = tokens.spread(old, spans, log_q)
    assert float(spread.rows()[0].sum()) == pytest.approx(float(log_q.rows()[0].sum()), rel=1e-6)
    assert float(spread.rows()[1][0]) == pytest.approx(float(log_q.rows()[1][0]), rel=1e-6)
    assert spread.rows()[1][1] == old.rows()[1][1]


def test_a_teacher_whose_tokens_have_no_bytes_is_refused_at_the_start(tmp_path):
    config, prompts = loaded(tmp_path, [{}], tokenizer=TeacherTokenizer.own)
    with pytest.raises(ConfigError, match="expected ByteLevel or ByteFallback"):
        with_teachers(config, prompts)
