"""Secrets are known by their names, and hidden wherever what they hold would be written."""

import json
import os
import subprocess
import sys

import pytest
from omegaconf import OmegaConf

from hybridrl.config.command.secrets import (
    argument_without_secret,
    config_secrets,
    hide_in_files,
    is_secret_key,
    is_secret_variable,
    known_secrets,
    secrets_of,
    without,
)
from hybridrl.controller.ray.runtime import worker_environment
from hybridrl.doctor.findings import Stage, warn
from hybridrl.doctor.report import write_report
from hybridrl.doctor.stages import StageReport
from hybridrl.trainer.tracking.provenance import plain
from tests.support.runs import ROOT
from tests.support.scorers import reward_scorer

SECRET = "xq7Zp0-unlikely"


@pytest.mark.parametrize(
    "name",
    [
        *("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"),
        *("RAY_AUTH_TOKEN", "HYBRIDRL_DOCTOR_KEY", "MLFLOW_TRACKING_PASSWORD", "SECRET_THING"),
        *("DB_PASS", "SMTP_PASS", "MYSQL_PWD", "PGPASS", "GITHUB_PAT", "REDIS_AUTH", "AWS_CREDS"),
        *("AZURE_STORAGE_CONNECTION_STRING", "SERVICEBUS_CONNECTIONSTRING"),
    ],
)
def test_variables_that_hold_secrets(name):
    assert is_secret_variable(name)


@pytest.mark.parametrize(
    "name",
    [
        *("PATH", "TOKENIZERS_PARALLELISM", "KEYBOARD", "HF_HOME", "OMP_NUM_THREADS", "MONKEYS"),
        *("PWD", "OLDPWD", "CI_BYPASS", "BYPASS_PROXY", "COMPASS_DIR", "MY_COMPASS", "PASS_AT_K"),
        *("AUTHOR", "GIT_AUTHOR_NAME", "XAUTHORITY", "SSH_AUTH_SOCK", "RAY_AUTH_MODE"),
        *("PYTHONPATH", "MY_PATTERN", "PGPASSFILE", "CONNECTION_STRINGS_FILE"),
    ],
)
def test_variables_that_do_not(name):
    assert not is_secret_variable(name)


def test_keys_are_secret_by_their_last_word():
    for key in ("api_key", "reward.args.token", "auth-token", "secret_access_key", "db.password"):
        assert is_secret_key(key)
    for key in (
        "db.pwd",
        "mysql_pwd",
        "backend_token",
        "hf.token",
        "blob.connection_string",
        "reward.args.signing_key",
    ):
        assert is_secret_key(key)
    for key in ("openai_key", "judge.subscription_key", "license-key", "api-key", "storagekey"):
        assert is_secret_key(key)
    for key in (
        "max_tokens",
        "token_env",
        "tests_key",
        "answer_key",
        "stop_token_ids",
        "reward.args.stop_token",
        "eos-token",
        "secretary",
        "pass_at_k",
        "single_pass",
        "pass",
        "author",
        "path",
    ):
        assert not is_secret_key(key)


def test_longer_secrets_are_hidden_first_and_short_values_are_no_secrets():
    environment = {"A_TOKEN": SECRET, "B_TOKEN": SECRET + "-longer", "C_KEY": "1"}
    secrets = secrets_of(environment, ["x", "+reward.args.api_key='from-the-line'", "seed=1"])
    text = f"1 {SECRET}-longer {SECRET} from-the-line https://me:pw@host/x"
    assert without(secrets, text) == "1 *** *** *** https://***@host/x"


def test_entries_of_a_mapping_on_the_command_line_are_hidden():
    line = (
        "+mine={name: x, api_key: 'pw 1', inner: {password: pw2}, server: https://u:p@h/x, lr: 1}"
    )
    shown = "+mine={name: x, api_key: ***, inner: {password: ***}, server: https://***@h/x, lr: 1}"
    assert argument_without_secret(line) == shown
    assert secrets_of({}, ["+mine={api_key: 'pw 1 is long'}"]) == ["pw 1 is long"]
    swept = secrets_of({}, ["+mine.api_key='number-1','number-22'"])
    assert swept[1:] == ["number-22", "number-1"]


def test_a_secret_is_hidden_in_the_config_whatever_its_key(monkeypatch):
    monkeypatch.setenv("JUDGE_TOKEN", SECRET)
    assert plain({"header": f"Bearer {SECRET}"}) == {"header": "Bearer ***"}


def test_the_doctors_report_holds_no_secret(tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE_TOKEN", SECRET)
    finding = warn("host.variables", "node", f"JUDGE_TOKEN is {SECRET}", "unset it")
    reports = [StageReport(Stage.host, [finding], 0.1)]
    path = write_report(tmp_path, reports, ["node"], ["+my.api_key=hunter22", "seed=1"])
    text = path.read_text()
    assert SECRET not in text and "hunter22" not in text
    assert json.loads(text)["overrides"] == ["+my.api_key=***", "seed=1"]


def test_files_lose_the_secrets_of_config_and_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE_TOKEN", SECRET)
    (tmp_path / "config.yaml").write_text(f"a: {{api_key: hunter22, b: {SECRET}, lr: 1e-6}}\n")
    config = OmegaConf.create(
        {"a": {"api_key": "hunter22", "list": [{"password": "deep-one", "secret": "${b}"}]}, "b": 1}
    )
    hide_in_files([tmp_path / "config.yaml"], config_secrets(config))
    assert (tmp_path / "config.yaml").read_text() == "a: {api_key: ***, b: ***, lr: 1e-6}\n"


def test_lists_sections_and_numbers_of_a_secret_key_are_secrets():
    config = OmegaConf.create(
        {
            "api_key": ["first-of-two", "second-of-two"],
            "credentials": {"user": "ann", "value": "${other}"},
            "other": "in-a-section",
            "password": 123456789,
            "secret": [7],
        }
    )
    hidden = {"first-of-two", "second-of-two", "in-a-section", "123456789", "${other}"}
    assert config_secrets(config) == hidden


@pytest.mark.parametrize(
    ("secret", "parts"),
    [
        ("it's 'quoted-1' it is", ["quoted-1"]),
        ('say "quoted-2" \\ twice', ["quoted-2"]),
        ("not-ascii-\u00fc\u00df-3", ["not-ascii"]),
        ("-----BEGIN-----\nMIIEvQIBADAN\n\nBgkqhkiG9w0B\n", ["MIIEvQ", "BgkqhkiG"]),
    ],
)
def test_a_secret_is_found_as_yaml_and_json_write_it(tmp_path, secret, parts):
    config = OmegaConf.create({"a": {"api_key": secret, "b": f"key {secret}"}})
    OmegaConf.save(config, tmp_path / "config.yaml")
    (tmp_path / "config.json").write_text(json.dumps(OmegaConf.to_container(config)))
    hide_in_files(tmp_path.iterdir(), config_secrets(config))
    for path in tmp_path.iterdir():
        text = path.read_text()
        assert not any(part in text for part in parts), text


def test_an_empty_line_of_a_secret_is_hidden_nowhere():
    assert without(known_secrets([f"first line\n{' ' * 12}\n"]), " " * 12) == " " * 12


def test_output_shows_no_secrets_even_in_a_traceback():
    code = (
        "import os\nfrom hybridrl.controller.output import guard_standard_output\n"
        "guard_standard_output()\nprint('token', os.environ['JUDGE_TOKEN'])\n"
        "print('https://me:pw@host/x')\n"
        "raise ValueError(dict(os.environ))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, "+my.api_key=hunter22"],
        env=os.environ | {"JUDGE_TOKEN": SECRET, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.stdout == "token ***\nhttps://***@host/x\n"
    assert "ValueError" in ran.stderr and "JUDGE_TOKEN" in ran.stderr
    assert SECRET not in ran.stderr


GUARDED = """
import logging, os, sys
from hybridrl.controller.output import guard_logging, guard_standard_output
guard_standard_output()
printing = [logging.StreamHandler(), logging.StreamHandler(sys.stdout)]
logging.basicConfig(handlers=[logging.FileHandler(sys.argv[1]), *printing], format="%(message)s")
log = logging.getLogger()
log.warning("begun")
guard_logging(["of-the-config"])
try:
    raise ValueError("of-the-config " + os.environ["JUDGE_TOKEN"])
except ValueError:
    log.exception("failed")
print("of-the-config")
"""


def test_log_files_and_handlers_hide_a_configs_secrets_too(tmp_path):
    ran = subprocess.run(
        [sys.executable, "-c", GUARDED, str(tmp_path / "main.log")],
        env=os.environ | {"JUDGE_TOKEN": SECRET, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    for text in (ran.stdout, ran.stderr, (tmp_path / "main.log").read_text()):
        assert text.startswith("begun\nfailed\nTraceback") and "ValueError: *** ***" in text
        assert SECRET not in text
    assert ran.stdout.endswith("***\n")


def test_an_evaluations_log_holds_no_secret(tmp_path):
    code = (
        "import logging, os, sys\nfrom pathlib import Path\n"
        "from hybridrl.commands.evaluate import _log_to\n_log_to(Path(sys.argv[1]))\n"
        "logging.getLogger('x').info('token %s', os.environ['JUDGE_TOKEN'])"
    )
    file = tmp_path / "eval.log"
    subprocess.run(
        [sys.executable, "-c", code, str(file)],
        env=os.environ | {"JUDGE_TOKEN": SECRET, "PYTHONPATH": str(ROOT)},
        check=True,
    )
    assert file.read_text().endswith("x: token ***\n")


def test_reward_processes_get_only_the_secrets_that_an_argument_names(tmp_path, monkeypatch):
    (tmp_path / "env_reward.py").write_text(
        "import os\n"
        "def score(prompt, response, example, *, key_env):\n"
        "    return 10.0 * ('OTHER_TOKEN' in os.environ) + ('JUDGE_TOKEN' in os.environ)"
        " + 0.5 * ('PLAIN_SETTING' in os.environ)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("JUDGE_TOKEN", "OTHER_TOKEN", "PLAIN_SETTING"):
        monkeypatch.setenv(name, SECRET)
    args = {"key_env": "JUDGE_TOKEN"}
    with reward_scorer(
        "env_reward.score", args, timeout_s=20.0, num_processes=1, failed_score=-1.0
    ) as scorer:
        assert scorer.score([("p", "r", {})]).scores == [1.5]


def test_a_clusters_workers_get_no_secret_but_the_token_for_downloads():
    names = ["HF_TOKEN", "HF_HOME", "HYBRIDRL_DOCTOR_KEY", "VLLM_API_KEY", "WANDB_API_KEY"]
    passed = worker_environment(dict.fromkeys(names, SECRET))
    assert {name for name, value in passed.items() if value == SECRET} == {"HF_TOKEN", "HF_HOME"}
