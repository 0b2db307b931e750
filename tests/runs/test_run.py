"""The whole program on one worker: what a run writes, what its numbers hold, what it leaves."""

import json
import math
import re
import secrets
from functools import partial

import pyarrow.compute as pc
import pytest
import torch
from pyarrow import parquet
from transformers import AutoModelForCausalLM, AutoTokenizer

from hybridrl.checkpoint.verification import newest_good
from hybridrl.trainer.state import read_state
from hybridrl.trainer.tracking.summary import phase_shares
from tests.support.metric_names import unexplained
from tests.support.runs import ROOT, SMALL, Run, launched, started
from tests.support.sockets import assert_this_machine_alone_reaches

PROMISED = [
    "step",
    "reward/mean",
    "eval/accuracy",
    "eval/accuracy_greedy",
    "actor/first_log_ratio_max",
    "actor/kl",
    "rollout/log_prob_diff_mean",
    "rollout/tokens_per_second",
    "response/length_mean",
    "time/reshard_s",
    "time/rollout_s",
    "time/update_actor_s",
    "time/step_s",
]


# In the environment, and on the command line under a secret key and in a URI.
VARIABLES = (
    *("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "HYBRIDRL_DOCTOR_KEY"),
    *("MLFLOW_TRACKING_PASSWORD", "JUDGE_API_KEY"),
)
IN_ENVIRONMENT = {name: secrets.token_urlsafe(24) for name in VARIABLES}
OF_KEY, OF_URI = secrets.token_urlsafe(24), secrets.token_urlsafe(24)
WITH_SECRETS = [
    f"+mine={{name: gsm8k_ppo, api_key: '{OF_KEY}', server: 'https://me:{OF_URI}@host/x'}}",
    "run.name=${mine.name}",
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Run, str]:
    """One small run of the recipe, ended, and what it printed."""
    run_dir = tmp_path_factory.mktemp("runs") / "run"
    recorded = ["trainer.samples_every_steps=1", "tracking.report=true"]
    overrides = [*SMALL, *recorded, *WITH_SECRETS]
    with started(run_dir, *overrides, env=IN_ENVIRONMENT) as run:
        run.wait_for('"step": 0,')
        run.listening()
        output = run.ended()
        yield run, output


def test_the_output_names_what_is_learned_from_and_what_comes_next(finished):
    run, output = finished
    for line in (
        r"run +gsm8k_ppo, seed 1",
        r"hardware +cpu: ",
        r"reward +hybridrl\.rewards\.gsm8k\.score \(mode strict\)",
        r"data +embedded: [\d,]+ training, [\d,]+ held out",
        r"chat template +the tokenizer's own",
        r"reference answer of '.*' \(.*\): reward 1",
        r"held-out accuracy +before +after",
        r"files .*final/",
        r"columns +reward: mean of the step's responses; .*KL: .*95 % confidence interval",
        rf"hybridrl eval .*{run.run_dir.name}",
        rf"hybridrl resume .*{run.run_dir.name} trainer\.total_steps=4",
    ):
        assert re.search(line, output), line
    assert "Traceback" not in output
    assert output.rstrip().endswith("report.html")  # no library adds to it at exit


def test_metrics_hold_what_is_promised(finished):
    rows = finished[0].metrics()
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(name in row for row in rows for name in PROMISED)
    evaluated = [row["step"] for row in rows if row["eval/accuracy"] is not None]
    assert evaluated == [0, 2]


def test_every_metric_is_explained(finished):
    names = {name for row in finished[0].metrics() for name in row}
    assert len(names) > 50
    assert unexplained(names) == []
    assert unexplained(["reward/mean", "reward/of_nobody"]) == ["reward/of_nobody"]


def test_setup_is_told_by_parts(finished):
    first, *others = finished[0].metrics()
    parts = {name for name in first if name.startswith("setup/")} - {"setup/total_s"}
    assert {"setup/checks_s", "setup/ray_s", "setup/imports_s", "setup/rollout_s"} <= parts
    assert sum(first[part] for part in parts) == pytest.approx(first["setup/total_s"])
    assert not any(name.startswith("setup/") for row in others for name in row)
    assert re.search(r"\nsetup +\d+\.\d s: checks \d", finished[1])


def test_phases_do_not_overlap(finished):
    """What the summary takes for phases adds up to the step, with `other` not below zero."""
    for row in finished[0].metrics():
        assert sum(share for _, share in phase_shares([row])) == pytest.approx(1.0)


def test_first_mini_batch_is_exactly_on_policy(finished):
    for row in finished[0].metrics()[1:]:
        assert row["actor/first_log_ratio_max"] == 0.0
        assert row["actor/log_ratio_max"] > 0.0  # the second mini-batch comes after an update


def test_vllm_samples_from_the_actors_weights(finished):
    for row in finished[0].metrics()[1:]:
        assert row["rollout/log_prob_diff_mean"] < 1e-4


def test_numbers_are_finite(finished):
    for row in finished[0].metrics():
        assert all(value is None or math.isfinite(value) for value in row.values())


def test_final_model_is_an_ordinary_folder(finished):
    folder = finished[0].run_dir / "final"
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Tom has 3 apples."}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    assert torch.isfinite(model(**ids).logits).all()


def test_run_directory_holds_the_record(finished):
    run_dir = finished[0].run_dir
    manifest = json.loads((run_dir / "manifest.json").read_text())
    assert manifest["seed"] == 1
    assert manifest["config"]["trainer"]["total_steps"] == 2
    found = newest_good(run_dir)
    state = read_state(found.folder)
    assert (state.step, state.prompts_taken, found.manifest.step) == (2, 2 * 8, 2)
    assert state.kl_coef == manifest["config"]["algorithm"]["kl"]["coef"]
    assert (run_dir / "report.html").stat().st_size < 3e6
    assert list(run_dir.glob("logs/*_rank0.log"))
    assert list(run_dir.glob("tensorboard/events*"))
    rollouts = (run_dir / "rollouts" / "step_2.jsonl").read_text().splitlines()
    assert len(rollouts) == 8 * 4
    assert {"prompt", "response", "score"} <= json.loads(rollouts[0]).keys()
    evaluated = [f"rollouts/eval_step_{step}.jsonl" for step in (0, 2)]
    kinds = [json.loads(line)["kind"] for line in (run_dir / evaluated[1]).read_text().splitlines()]
    assert kinds == ["sampled"] * 20 + ["greedy"] * 20
    assert sorted(run_dir.glob("rollouts/eval*")) == [run_dir / name for name in evaluated]


def test_the_timeline_has_every_section_and_call(finished):
    run_dir, rows = finished[0].run_dir, finished[0].metrics()
    lines = [json.loads(line) for line in (run_dir / "timeline.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    for line, row in zip(lines, rows[1:], strict=True):
        assert line["seconds"] == pytest.approx(row["time/step_s"], abs=1e-6)
        for section in line["sections"]:
            (calls,) = section["ranks"]
            spans = [section, *calls]
            assert all(-0.1 < span["start"] < line["seconds"] for span in spans)
            assert sum(call["seconds"] for call in calls) <= section["seconds"]
        methods = [call["method"] for part in line["sections"] for call in part["ranks"][0]]
        assert {"rollout.generate", "critic.update", "actor.update"} <= {*methods}
        assert methods.count("actor.compute_token_stats") == 1


def test_the_records_page_reads_them_as_written(finished, monkeypatch, capsys):
    page = (ROOT / "docs" / "records.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(finished[0].run_dir)
    exec(code.replace("step_10", "step_2"), {})
    assert "'new_log_prob': -" in capsys.readouterr().out
    columns = parquet.read_schema("tokens/step_2.parquet").names
    line, *_ = (finished[0].run_dir / "rollouts" / "eval_step_2.jsonl").read_text().splitlines()
    fields = json.loads(line).keys()
    assert all(f"`{name}`" in page for name in [*columns, *fields])


def test_recorded_tokens_are_those_of_their_responses_and_of_the_final_policy(finished):
    """transformers, with the model after the last step, has the new log-probs and entropies."""
    run_dir = finished[0].run_dir
    model = AutoModelForCausalLM.from_pretrained(run_dir / "final")
    tokenizer = AutoTokenizer.from_pretrained(run_dir / "final")
    lines = (run_dir / "rollouts" / "step_2.jsonl").read_text().splitlines()
    table = parquet.read_table(run_dir / "tokens" / "step_2.parquet")
    assert len(table["response"].unique()) == 4
    for response in table["response"].unique().to_pylist():
        told = json.loads(lines[response])
        rows = table.filter(pc.field("response") == response).to_pydict()
        assert rows["position"] == [*range(told["length"])]
        assert "".join(rows["token"]).startswith(told["response"])
        prompt = tokenizer(told["prompt"], add_special_tokens=False)["input_ids"]
        ids = torch.tensor([prompt + rows["token_id"]])
        with torch.no_grad():
            log_probs = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        wanted = log_probs.gather(1, ids[0, len(prompt) :, None]).squeeze(1)
        close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4)
        close(torch.tensor(rows["new_log_prob"]), wanted)
        close(torch.tensor(rows["entropy"]), -(log_probs.exp() * log_probs).sum(-1))
        close(torch.tensor(rows["old_log_prob"]), torch.tensor(rows["rollout_log_prob"]))
        assert rows["version"] == [1] * told["length"] and told["weight_version"] == 1
        assert all(rows["trained"]) and None not in rows["clipped"] + rows["return_"]
        sums = zip(rows["value"], rows["ref_log_prob"], rows["advantage"], strict=True)
        assert all(math.isfinite(number) for row in sums for number in row)


def texts_of(run: Run, output: str) -> dict[str, bytes]:
    """What a run printed, and the files in its directory."""
    files = {str(path): path.read_bytes() for path in run.run_dir.rglob("*") if path.is_file()}
    return {"output": output.encode(), **files}


def leaks(texts: dict[str, bytes], every: dict[str, str]) -> list[tuple[str, str]]:
    """Where a secret is in a text, and which."""
    return [
        (name, what)
        for name, text in texts.items()
        for what, secret in every.items()
        if secret.encode() in text
    ]


def test_no_secret_is_written_or_printed(finished):
    run, output = finished
    texts = texts_of(run, output)
    assert any("tensorboard" in name for name in texts)
    assert any(".hydra" in name for name in texts)
    assert leaks(texts, {**IN_ENVIRONMENT, "a secret key": OF_KEY, "a URI": OF_URI}) == []
    written = texts[str(run.run_dir / ".hydra" / "config.yaml")].decode()
    assert "api_key: ***" in written and "https://***@host/x" in written


def test_no_secret_of_a_sweep_is_written_or_printed(tmp_path):
    """One job finds no key that reads them, the other logs and raises them in a user's module."""
    of_file, looked_up = secrets.token_urlsafe(24), secrets.token_urlsafe(24)
    (tmp_path / "conf" / "mine").mkdir(parents=True)
    (tmp_path / "conf" / "mine" / "own.yaml").write_text(
        f"password: {of_file}\nsecret: ${{oc.env:PLAIN_NAME}}\n"
    )
    told = {"of_file": of_file, "PLAIN_NAME": looked_up, **IN_ENVIRONMENT}
    (tmp_path / "telling.py").write_text(
        f"import logging, sys\ntold = {'-'.join(told.values())!r}\n"
        "if 'hydra' in sys.modules:  # not where the import is tried first\n"
        "    logging.getLogger(__name__).warning('telling %s', told)\n"
        "    raise RuntimeError(told)\n"
    )
    arguments = ["--config-dir", str(tmp_path / "conf"), "+mine=own", "hardware=cpu"]
    arguments += ["run.dry=true", "-m", f"hydra.sweep.dir={tmp_path / 'sweep'}"]
    arguments += ["reward.function=telling.score,hybridrl.rewards.gsm8k.score"]
    arguments += [f"+more={{api_key: '{OF_KEY}', server: 'https://me:{OF_URI}@host/x'}}"]
    environment = IN_ENVIRONMENT | {"PLAIN_NAME": looked_up}
    environment["PYTHONPATH"] = f"{ROOT}:{tmp_path}"
    with launched(tmp_path / "sweep", "hybridrl.main", *arguments, env=environment) as run:
        output = run.output()
    assert run.process.returncode == 1, output
    texts = texts_of(run, output)
    assert leaks(texts, told | {"a secret key": OF_KEY, "a URI": OF_URI}) == []
    log, table = (texts[str(run.run_dir / name)] for name in ("0/main.log", "sweep.json"))
    assert b"telling ***" in log and "RuntimeError: ***" in output
    assert b"mine.password = ***" in table
    assert b"mine.password = ***" in table
    assert b"password: ***" in texts[str(run.run_dir / "multirun.yaml")]


def test_a_command_line_that_is_refused_shows_no_secret_of_a_file(tmp_path):
    (tmp_path / "conf" / "mine").mkdir(parents=True)
    (tmp_path / "conf" / "mine" / "own.yaml").write_text(f"password: {OF_KEY}\n")
    arguments = ["--config-dir", str(tmp_path / "conf"), "+mine=own", "hardware=cpu", "nix=1"]
    with launched(tmp_path / "here", "hybridrl.main", *arguments) as run:
        output = run.output()
    assert run.process.returncode == 2
    assert "mine.password = ***" in output and OF_KEY not in output


def test_every_port_of_a_run_on_one_machine_is_loopback_only(finished):
    """Ray, the rendezvous, gloo and vLLM included; the dashboard is off."""
    listeners = finished[0].listeners
    assert len(listeners) > 5
    assert_this_machine_alone_reaches(listeners)
