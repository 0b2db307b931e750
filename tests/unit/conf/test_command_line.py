"""The command line: in process where that is enough, and through the real command for the rest."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from hybridrl.app.sweep import JobResult, ranked
from hybridrl.cli import COMMANDS
from hybridrl.commands import init
from hybridrl.config.command.command_line import parse_argv
from hybridrl.config.command.overrides import names_hardware, precompose, quoted
from hybridrl.config.errors import ConfigError
from hybridrl.config.load import is_on
from hybridrl.main import conf_dir
from tests.support.composing import REPO, TINY, composed, mistakes, only, told

DRY = ["+recipe=gsm8k_ppo", "run.dry=true"]
THEIR_LINE = """
    --actor.adam.lr 5e-7 --algo.advantage.is_correction_threshold 0.5 5.0 --train.colocate_all
    --ckpt.output_dir /tmp/x --reward.clip_range -10 10
    --rollout.n_samples_per_prompt=8 --rollout.temperature 1.0
"""
OWN_ACTOR = """
from dataclasses import dataclass
from hybridrl.config.schema import ActorConfig
from hybridrl.workers.actor import ActorWorker

@dataclass(kw_only=True)
class ShortFirstConfig(ActorConfig):
    free_tokens: int

class ShortFirst(ActorWorker):
    config_class = ShortFirstConfig
"""


@pytest.fixture(scope="session")
def dry(tmp_path_factory) -> list[str]:
    """The recipe's dry run on a model folder of a few files."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(TINY))
    tokenizer = Tokenizer(WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return [*DRY, f"model.path={folder}", "model.init=random"]


def command(*args: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """`python -m hybridrl.main` as a user calls it."""
    env = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    env |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | environment
    call = [sys.executable, "-m", "hybridrl.main", *args]
    return subprocess.run(call, cwd=cwd, env=env, capture_output=True, text=True, timeout=120)


def overrides_of(*argv: str) -> list[str]:
    """Messages of the problems of an argv's overrides."""
    return [str(problem) for problem in precompose(parse_argv(argv), conf_dir()).problems]


MISTAKES = """
unknown_key trainer.total_step=3 trainer.total_step=3 | Did you mean trainer.total_steps?
unknown_key lr=1 lr=1 | actor.optim.lr
no_section lora.alpha=8 lora.alpha=8 | there is no lora, so nothing reads it. | Set lora=default
no_section reward_model.weight=2 reward_model.weight=2 | Set reward_model=default
no_section environment.max_turns=3 environment.max_turns=3 | Set environment=custom
no_section environment.max_turns=3 environment.max_turns=3 +environment.args.attempts=3
unknown_key reward_model.reward_manager=dapo reward_model.reward_manager=dapo \
    | verl's reward_model.reward_manager is reward
no_section agent.timeout_s=3 agent.timeout_s=3 | Set environment=agent
choice fsdp=nope fsdp=nope | full_shard, hybrid_shard
choice +recipe=gsm8k +recipe=gsm8k | Did you mean | gsm8k_ppo? | Your own
added_group recipe=gsm8k_ppo recipe=gsm8k_ppo | Type +recipe=gsm8k_ppo
chosen_group +lora=default +lora=default | Type lora=default
sweep seed=1,2 seed=1,2
interval actor.optim.lr=interval(1e-6,1e-4) -m actor.optim.lr=interval(1e-6,1e-4) \
    | Type hydra/sweeper=optuna
choice hydra/launcher=nope -m hydra/launcher=nope | hybridrl[sweeps]
copy actor.fsdp.dp_shard=2 actor.fsdp.dp_shard=2 | Set fsdp.dp_shard=2
copy actor.model.path=x actor.model.path=x | Set model.path=x
copy actor.algorithm.kl.coef=0 actor.algorithm.kl.coef=0 | Set algorithm.kl.coef=0
override a=b=c' a=b=c'
override =3 =3 | it has no key
override = =
override + +
override ~ ~
directory hydra.run.dir= hydra.run.dir=
new_argument reward.args.mood=good reward.args.mood=good | type +reward.args.mood=good
directory hydra.sweep.dir=null -m hydra.sweep.dir=null
unknown_key algoritm=grpo algoritm=grpo | Did you mean algorithm?
not_applied ~nothing ~nothing | does not exist
not_applied +seed=3 +seed=3 | already
unknown_key nix=1,2 -m seed=1,2 nix=1,2
choice model=embedded,nope -m model=embedded,nope | model has no nope
override seed=range(0) -m seed=range(0) | it has no value
override model=glob(x*) -m model=glob(x*) | it has no value
override hydra.searchpath=[3] hydra.searchpath=[3] | expected a list of folders
unknown_key critic.model.use_remove_padding=True critic.model.use_remove_padding=True \
    | packed without padding
unknown_key critic.model.enable_gradient_checkpointing=1 \
    critic.model.enable_gradient_checkpointing=1 | is fsdp.activation_checkpointing here
unknown_key critic.model.fsdp_config.param_offload=True \
    critic.model.fsdp_config.param_offload=True | is fsdp.offload here
copy critic.model.path=x critic.model.path=x | Set model.path=x
unknown_key critic.forward_max_token_len_per_gpu=9 critic.forward_max_token_len_per_gpu=9 \
    | is actor.max_tokens_per_gpu here
unknown_key n_gpus=8 n_gpus=8 | is cluster.gpus_per_node here
unknown_key batch_size=8 batch_size=8 | is data.prompts_per_step here
unknown_key actor_rollout_ref.rollout.layered_summon=True \
    actor_rollout_ref.rollout.layered_summon=True | rollout.reshard_bucket_mb
"""


@pytest.mark.parametrize("mistake", mistakes(MISTAKES))
def test_a_wrong_override_gets_one_problem(mistake):
    line = parse_argv(["hardware=cpu", *mistake.overrides])
    assert told(mistake, precompose(line, conf_dir()).problems) == [mistake]


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        (f"seed={'9' * 5000}", "more than 4,300 digits"),
        (f"+data.x={'[' * 500}{']' * 500}", "nested too deeply"),
    ],
)
def test_an_endless_value_is_cut(override, reason):
    (problem,) = precompose(parse_argv(["hardware=cpu", override]), conf_dir()).problems
    assert problem.id == "override" and override.startswith(problem.key[:9])
    assert reason in problem.why and len(str(problem)) < 600


@pytest.mark.parametrize(
    ("argument", "end"),
    [
        ("--trainer.total_steps=5", "without dashes.\nType trainer.total_steps=5."),
        ("--my_key=5", "key=value, without dashes."),
        ("-lr", "verl's actor_rollout_ref.actor.optim.lr is actor.optim.lr here."),
        ("--num_generations", "without dashes.\nTRL's num_generations is {} here."),
    ],
)
def test_settings_with_dashes_are_refused(argument, end):
    line = parse_argv(["hardware=cpu", "seed=3", argument])
    (problem,) = precompose(line, conf_dir()).problems
    assert (problem.id, problem.key) == ("option", argument)
    assert str(problem).endswith(end.format("rollout.responses_per_prompt"))


def test_another_trainers_command_line_gets_a_hint_for_each_option():
    """Values behind an option are no problems of their own, and wrong keys are named as well."""
    theirs = THEIR_LINE.split()
    found = overrides_of("hardware=cpu", *theirs, "+seeed=3", "trainer.total_step=3", "seed=2")
    assert [re.split("[:,]", problem)[0] for problem in found] == [
        *(word.partition(":")[0] for word in theirs if word.startswith("--")),
        "trainer.total_step=3",
    ]
    assert all(" here" in problem for problem in found[:-2])
    assert "Type rollout.temperature=1.0" in found[-2]
    line = parse_argv([*theirs, "+recipe=gsm8k_ppo", "-m", "seed=1,2"])
    assert line.overrides == ["+recipe=gsm8k_ppo", "seed=1,2"] and line.sweeps


@pytest.mark.parametrize("mistake", mistakes(MISTAKES)[-8:])
def test_a_suggestion_of_another_trainers_key_is_not_refused_next(mistake):
    (problem,) = overrides_of("hardware=cpu", *mistake.overrides)
    assert problem.count("Set ") == ("Set model.path" in problem)


def test_a_key_without_default_of_an_own_worker_needs_a_plus(tmp_path):
    own = tmp_path / "own_actor.py"
    own.write_text(OWN_ACTOR)
    worker = f"actor.worker={own}:ShortFirst"
    line = parse_argv(["hardware=cpu", worker, "actor.free_tokens=16"])
    (problem,) = precompose(line, conf_dir()).problems
    assert (problem.id, problem.remedy) == ("new_key", "Type +actor.free_tokens=16")
    problem = only("hardware=cpu", "+recipe=gsm8k_grpo", worker)
    assert problem.id == "missing"
    assert f"it is missing, and ShortFirstConfig in {own} has no default" in problem.why


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"seed:\t3\n\ttrainer: 3\n", "mine.yaml"),
        (b"run: {name: caf\xe9}\n", "not UTF-8 text"),
        (b"seed: " + b"9" * 5000, "more than 4,300 digits"),
        (b"a: &a [*a]\n", "nested too deeply"),
        (b"seed: 1\nseed: 2\n", "duplicate key seed"),
        (b"- a\n", "ListConfig"),
        (b"null: 3\n", "key type"),
    ],
)
def test_a_recipe_that_cannot_be_read_is_named(tmp_path, content, words):
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_bytes(b"# @package _global_\n" + content)
    (found,) = overrides_of("hardware=cpu", "--config-dir", str(tmp_path), "+recipe=mine")
    assert found.startswith("+recipe=mine: ") and words in found


def test_a_group_whose_main_key_the_recipe_sets_is_refused(tmp_path):
    """Hydra would go on with the recipe's data and reward, and say nothing."""
    (tmp_path / "recipe").mkdir()
    own = "data: {train_files: a.jsonl, eval_files: '${oc.env:NO}'}\nreward: {function: a.py:f}\n"
    (tmp_path / "recipe" / "mine.yaml").write_text(f"# @package _global_\n{own}")
    line = ["hardware=cpu", "--config-dir", str(tmp_path), "+recipe=mine"]
    more = parse_argv([*line, "data=gsm8k", "reward=math", "model=embedded_moe"])
    found = precompose(more, conf_dir()).problems
    assert [(p.id, p.key, p.why.partition(", and")[0]) for p in found] == [
        ("hidden_choice", "data=gsm8k", "no effect: the recipe sets data.train_files"),
        ("hidden_choice", "reward=math", "no effect: the recipe sets reward.function"),
    ]
    assert not overrides_of(*line, "data=gsm8k", "data.train_files=null")


def test_a_recipe_that_a_built_in_one_hides_is_refused(tmp_path):
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "gsm8k_grpo.yaml").write_text("# @package _global_\nseed: 7\n")
    line = parse_argv(["hardware=cpu", "--config-dir", str(tmp_path), "+recipe=gsm8k_grpo"])
    (problem,) = precompose(line, conf_dir()).problems
    assert problem.id == "hidden_file"
    assert f"hides {tmp_path}/recipe/gsm8k_grpo.yaml" in problem.why


@pytest.mark.parametrize("name", ["Données (v1)", "a,b", "it's", "a=b #c &d ~[e]"])
def test_a_config_dir_may_have_any_name(tmp_path, name):
    (tmp_path / name / "recipe").mkdir(parents=True)
    (tmp_path / name / "recipe" / "mine.yaml").write_text("# @package _global_\nseed: 7\n")
    line = parse_argv(["--config-dir", str(tmp_path / name), "+recipe=mine", "hardware=cpu"])
    assert precompose(line, conf_dir()).cfg.seed == 7


@pytest.mark.parametrize(
    ("value", "expected"), [("no", False), ("off", False), (True, True), ("on", True), (3.5, False)]
)
def test_a_switch_is_read_early_as_in_the_typed_config(value, expected):
    assert is_on(OmegaConf.create({"run": {"dry": value}}), "run.dry") is expected


def test_all_wrong_overrides_are_named_at_once():
    found = overrides_of("hardware=cpu", "a.b=1", "fsdp=nope", "trainer.steps=3", "seed=2")
    assert [re.split("[:,]", problem)[0] for problem in found] == [
        "fsdp=nope",
        "a.b=1",
        "trainer.steps=3",
    ]


@pytest.mark.parametrize(
    "argv",
    [
        ["+recipe=gsm8k_ppo", "-m", "seed=1,2"],
        ["-m", "actor.optim.lr=1e-6,2e-6", "fsdp=full_shard,hybrid_shard"],
        ["--multirun", "seed=range(3)"],
        ["++trainer.total_steps=3", "~trainer.save_final_model"],
        ["actor.optim.betas=[0.9,0.95]"],
        ["hydra.run.dir=somewhere", "hydra.mode=RUN"],
        ["data.train_files=[a.jsonl,b.jsonl]"],
        ["lora.alpha=8", "lora=default"],
    ],
    ids=" ".join,
)
def test_right_overrides_pass(argv):
    assert overrides_of("hardware=cpu", *argv) == []


def test_the_first_job_of_a_sweep_stands_for_it():
    """Of an interval its start: the config is checked with it before Optuna draws one."""
    argv = ["-m", "hydra.sweeper._target_=my.Sweeper", "hardware=cpu", "seed=range(3,5)"]
    argv += ["actor.optim.lr=tag(log,interval(1e-6,1e-4))", "algorithm=choice(grpo,ppo)"]
    found = precompose(parse_argv(argv), conf_dir())
    assert found.problems == [] and found.cfg is not None
    assert (found.cfg.seed, found.cfg.actor.optim.lr) == (3, 1e-6)
    assert found.cfg.algorithm.advantage == "grpo"


def test_options_may_stand_anywhere():
    line = parse_argv(["+recipe=x", "-m", "seed=1,2", "--config-dir", "/", "a=b"])
    assert line.overrides == ["+recipe=x", "seed=1,2", "a=b"]
    assert line.options == ["-m", "--config-dir", "/"]
    with pytest.raises(ConfigError) as refused:
        parse_argv(["--config-dir=here"])
    assert [problem.id for problem in refused.value.problems] == ["config_dir"]
    assert line.args.multirun


def test_hardware_is_seen_among_overrides():
    assert names_hardware(["seed=1", "hardware=gpu"])
    assert not names_hardware(["hardware.reason=x", "+recipe=hardware"])


def test_quoted_text_survives_hydra():
    text = "it's 2 cores, {a: 1} ${no} \\ [x]"
    cfg = composed(["hardware=cpu", f"run.name={quoted('a, b (c) = [d]')}"])
    assert cfg.run.name == "a, b (c) = [d]"
    assert quoted(text).startswith("'it\\'s")


def test_results_are_ranked_best_first_and_failures_last():
    def result(job: int, metric: float | None) -> JobResult:
        return JobResult(job, [], "ok" if metric is not None else "failed", metric, 1.0, "")

    results = ranked([result(0, None), result(1, 0.2), result(2, 0.0), result(3, 0.9)])
    assert [r.job for r in results] == [3, 1, 2, 0]


def test_a_config_error_has_no_traceback_and_exit_code_2(dry, tmp_path):
    start = time.perf_counter()
    done = command(*dry, "actor.mini_batch_size=7", "trainer.total_step=3", cwd=tmp_path)
    assert time.perf_counter() - start < 20  # about 1 s on an idle machine: no torch
    assert done.returncode == 2
    assert "Traceback" not in done.stderr + done.stdout
    assert "ConfigError: 2 problems in the config" in done.stderr
    assert "trainer.total_step=3: unknown key" in done.stderr
    assert "actor.mini_batch_size = 7, expected a divisor of the 512 responses" in done.stderr


@pytest.mark.parametrize(
    ("argv", "problems"),
    [
        (
            ["hydra.run.dir=taken", "actor.mini_batch_size=7"],
            ["hydra.run.dir: the directory cannot be created", "actor.mini_batch_size = 7"],
        ),
        (["hydra.run.dir=/proc/here"], ["hydra.run.dir: the directory cannot be created"]),
        (["hydra.run.dir=/proc"], ["hydra.run.dir: the directory cannot be created"]),
        (["-m", "seed=1,2", "hydra.sweep.dir=taken/here"], ["hydra.sweep.dir: the directory"]),
        (
            ["-m", "seed=1,2", "hydra/launcher=submitit_slurm"],
            ["hydra/launcher=submitit_slurm: this"],
        ),
        (["run.name=${oc.env:NOT_SET}"], ["run.name = ${oc.env:NOT_SET}: it cannot be resolved"]),
        (
            ["hydra.run.dir=${nowhere.at_all}"],
            ["hydra.run.dir: Interpolation key"],
        ),
        (["--config-name", "foo"], ["Cannot find primary config 'foo'"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_a_directory_that_cannot_be_written_to_or_named_is_a_problem(dry, tmp_path, argv, problems):
    (tmp_path / "taken").write_text("a file")
    done = command(*dry, *argv, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    found = [line for line in done.stderr.splitlines() if line.startswith("- ")]
    assert len(found) == len(problems), done.stderr
    assert all(f"- {words}" in done.stderr for words in problems), done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


@pytest.mark.parametrize("closed", ["<&- >&- 2>&-", "| true"])
def test_a_command_goes_on_when_nobody_reads_what_it_prints(dry, tmp_path, closed):
    """Of a pipe's reader nothing is left; a closed stream must not become another file's."""
    words = [sys.executable, "-m", "hybridrl.main", *dry, "-m", "seed=1", "hydra.sweep.dir=here"]
    script = f"mkdir here; set -o pipefail; {shlex.join(words)} {closed}"
    env = dict(os.environ, CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert "Traceback" not in done.stderr
    assert (tmp_path / "here/0/.hydra/config.yaml").read_text().startswith("model:")


def test_data_and_config_problems_are_in_one_report(dry, tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"question": "1+1?", "answer": "#### 2"}\n{oops\n')
    args = ["data.train_files=bad.jsonl", "rollout.tensor_parallel_size=3"]
    done = command(*dry, *args, cwd=tmp_path)
    assert done.returncode == 2
    assert "bad.jsonl:2" in done.stderr
    assert "rollout.tensor_parallel_size = 3" in done.stderr


def test_a_dry_run_prints_the_plan_and_starts_nothing(dry, tmp_path):
    args = ["cluster.gpus_per_node=2", "rollout.tensor_parallel_size=2", "hydra.run.dir=here"]
    done = command(*dry, *args, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for words in (
        "2 ranks",
        "dp_replicate 1 x dp_shard 2",
        "64 prompts x 8 = 512",
        "no NVIDIA GPU",
        "update actor",
        "hybridrl.workers.actor.ActorWorker",
        "Dry run: nothing was started",
    ):
        assert words in done.stdout, words
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_its_machine_refuses_leaves_nothing(tmp_path):
    """The preflight comes after Hydra has made the folder."""
    args = ["+recipe=gsm8k_ppo", "hardware=cpu"]
    done = command(*args, cwd=tmp_path, GLOO_SOCKET_IFNAME="nope")
    assert done.returncode == 2, done.stderr
    assert "GLOO_SOCKET_IFNAME=nope names no interface" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_resume_takes_the_runs_command_and_directory(dry, tmp_path):
    """From anywhere: relative paths are those of the directory the run was started in."""
    for name in ("project", "runs/mine", "elsewhere"):
        (tmp_path / name).mkdir(parents=True)
    rows = [{"question": f"1+{n}?", "answer": f"#### {1 + n}"} for n in range(100)]
    lines = [json.dumps(row) + "\n" for row in rows]
    (tmp_path / "project" / "my.jsonl").write_text("".join(lines))
    own = ["data.train_files=my.jsonl", "data.num_eval_problems=9", "seed=7"]
    manifest = {
        **{"run": "mine", "started": "2026-01-01T00:00:00+00:00", "config_dirs": []},
        **{"config": {"trainer": {"total_steps": 5}}, "directory": str(tmp_path / "project")},
        "overrides": [*dry, *own],
    }
    (tmp_path / "runs" / "mine" / "manifest.json").write_text(json.dumps(manifest))
    call = [
        sys.executable,
        "-m",
        "hybridrl.cli",
        "resume",
        "../runs/mine",
        "data.prompts_per_step=32",
    ]
    done = subprocess.run(
        call,
        cwd=tmp_path / "elsewhere",
        env=dict(os.environ, CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "Dry run: nothing was started" in done.stdout
    assert "32 prompts x 8 = 256" in done.stdout
    assert [path.name for path in (tmp_path / "runs" / "mine").iterdir()] == ["manifest.json"]
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_the_embedded_model_and_problems_pass_every_check(tmp_path):
    """What a machine without GPU runs when nothing else is said."""
    done = command(*DRY, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "embedded: qwen2" in done.stdout or "embedded: llama" in done.stdout


def test_a_sweep_with_a_failing_job_runs_the_others_and_prints_one_table(dry, tmp_path):
    done = command(*dry, "-m", "actor.mini_batch_size=7,256", "seed=1,2", cwd=tmp_path)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr + done.stdout
    (folder,) = (tmp_path / "multirun" / "gsm8k_ppo").iterdir()
    results = json.loads((folder / "sweep.json").read_text())
    assert [(r["job"], r["status"]) for r in results] == [
        (0, "failed"),
        (1, "failed"),
        (2, "dry"),
        (3, "dry"),
    ]
    table = done.stdout[done.stdout.index("Sweep, best first") :]
    assert "seed=2 actor.mini_batch_size=256" in table or "actor.mini_batch_size=256" in table
    assert "expected a divisor of the 512" in table
    assert table.count("dry") == 2


def test_a_sweep_of_dry_runs_prints_their_plans_and_leaves_nothing(dry, tmp_path):
    done = command(*dry, "-m", "seed=1,2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Dry run: nothing was started") == 2
    assert "Sweep, best first" in done.stdout and "Written to" not in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_own_code_of_a_run_is_tried_as_often_as_in_a_dry_run(dry, tmp_path):
    """Hydra's job takes the checks that were made before it."""
    (tmp_path / "mine.py").write_text(
        "open('tried', 'a').write('x')\n"
        "def loss(log_probs, old_log_probs, advantages):\n    return -log_probs * advantages\n"
    )
    own = [*dry, "hardware=cpu", "algorithm.loss.function=mine.loss"]
    own += ["hydra.run.dir=${hydra:runtime.choices.algorithm}"]
    assert command(*own, cwd=tmp_path).returncode == 0
    tried = (tmp_path / "tried").read_text()
    (tmp_path / "tried").unlink()
    done = command(*own, "run.dry=false", cwd=tmp_path, GLOO_SOCKET_IFNAME="nope")
    assert done.returncode == 2 and "names no interface" in done.stderr, done.stderr
    assert (tmp_path / "tried").read_text() == tried
    assert not (tmp_path / "ppo").exists()


def test_cfg_job_shows_the_config_and_the_hardware_found(tmp_path):
    done = command("+recipe=gsm8k_ppo", "--cfg", "job", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "name: gsm8k_ppo" in done.stdout
    assert "accelerator: cpu" in done.stdout
    assert re.search(r"reason: .*no NVIDIA GPU", done.stdout)
    assert list(tmp_path.iterdir()) == []


def test_a_failing_nvidia_smi_chooses_no_hardware(dry, tmp_path):
    """It is told with what else is wrong; hardware as the advice says does not need it."""
    script = tmp_path / "nvidia-smi"
    script.write_text("#!/bin/sh\necho 'Failed to initialize NVML: Unknown Error'; exit 255\n")
    script.chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": "0"}
    done = command(*dry, "trainer.total_step=3", cwd=tmp_path, **path)
    assert done.returncode == 2, done.stdout
    assert "2 problems in the config" in done.stderr
    assert "nvidia-smi failed: Failed to initialize NVML: Unknown Error" in done.stderr
    assert "Did you mean trainer.total_steps?" in done.stderr
    assert "Traceback" not in done.stderr
    assert "set hardware=gpu cluster.gpus_per_node=N run.dry=true" in done.stderr
    small = ["data=embedded", "rollout.max_prompt_tokens=192", "rollout.max_response_tokens=48"]
    for given in (["hardware=cpu"], ["hardware=gpu", "cluster.gpus_per_node=1"]):
        done = command(*dry, *small, *given, cwd=tmp_path, **path)
        assert (done.returncode, done.stderr) == (0, "")


def test_a_cluster_that_is_not_there_is_told_with_what_else_is_wrong(dry, tmp_path):
    done = command(
        *dry, "hardware=cpu", "trainer.total_step=3", cwd=tmp_path, RAY_ADDRESS="127.0.0.1:1"
    )
    assert done.returncode == 2, done.stdout
    assert "2 problems in the config" in done.stderr
    assert "Did you mean trainer.total_steps?" in done.stderr
    assert "RAY_ADDRESS=127.0.0.1:1: no Ray cluster answers there" in done.stderr


def test_main_works_when_imported_and_with_a_recipe_and_a_reward_of_the_users(dry, tmp_path):
    """As a console script does it: its own folder on sys.path, not the current one."""
    (tmp_path / "mine" / "recipe").mkdir(parents=True)
    (tmp_path / "mine" / "recipe" / "my_recipe.yaml").write_text(
        "# @package _global_\nrun:\n  name: my_run\nreward:\n  function: my_reward.score\n"
        "  args: {depth: 2}\n"
    )
    (tmp_path / "my_reward.py").write_text(
        "def score(prompt, response, example, depth):\n    return 1.0\n"
    )
    script = tmp_path / "bin" / "script"
    script.parent.mkdir()
    script.write_text("from hybridrl.main import main\nmain()\n")
    args = ["+recipe=my_recipe", *dry[1:], "--config-dir", "mine"]
    done = subprocess.run(
        [sys.executable, str(script), *args],
        cwd=tmp_path,
        env=dict(os.environ, CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "my_run" in done.stdout
    assert "my_reward.score (depth 2)" in done.stdout


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_the_command_with_its_own_code(dry, tmp_path, signum, code):
    """The user's module waits while the config is checked."""
    (tmp_path / "waiting.py").write_text(
        "import time\nopen('reached', 'w').close()\ntime.sleep(60)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "hybridrl.main", *dry, "reward.function=waiting.score"],
        cwd=tmp_path,
        env=dict(os.environ, CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1"),
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "reached").exists() and time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.05)
    process.send_signal(signum)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == code, errors
    assert "Traceback" not in errors


def shown_commands(*patterns: str) -> list[list[str]]:
    """Commands with their arguments in the code blocks of pages."""
    pages = [page for pattern in patterns for page in REPO.glob(pattern)]
    text = "\n".join(page.read_text() for page in pages).replace("\\\n", " ")
    text = re.sub(r"python -m hybridrl\.main", "hybridrl train", text)
    blocks = re.findall(r"^```\w*\n(.*?)^```|^( {4}[^\n]*\n)", text, re.MULTILINE | re.DOTALL)
    code = "".join(fenced + indented for fenced, indented in blocks)
    lines = re.findall(r"^ *(?:[A-Z_]+=\S+ )*(?:\S*/)?hybridrl +(.+)$", code, re.MULTILINE)
    commands = [tuple(shlex.split(line, comments=True)) for line in lines]
    return [list(words) for words in dict.fromkeys(commands) if words]


@pytest.mark.parametrize(
    "patterns",
    [
        ["README.md", "docs/quickstart.md", "docs/tutorial_*.md"],
        pytest.param(["docs/*.md", "recipes/*/README.md"], marks=pytest.mark.slow),
    ],
)
def test_every_shown_command_is_one_and_composes(tmp_path, monkeypatch, patterns):
    """In a folder as `hybridrl init my_task` writes it, which some pages begin with."""
    monkeypatch.setattr(sys, "argv", ["init", str(tmp_path / "my_task")])
    init.main()
    monkeypatch.chdir(tmp_path / "my_task")
    commands = shown_commands(*patterns)
    assert len(commands) > 20
    for name, *argv in commands:
        assert name in COMMANDS, (name, argv)
        # test_sweepers.py runs what needs the extra `sweeps`.
        if name != "train" or any(word.endswith(("=optuna", "=joblib")) for word in argv):
            continue
        line = parse_argv(argv)
        if not names_hardware(line.overrides):
            line.overrides.append("hardware=cpu")
        assert precompose(line, conf_dir()).problems == [], argv


def test_an_installed_wheel_has_every_package_and_composes(tmp_path):
    """conf/ stands beside the package here and travels inside it in a wheel."""
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q"]
    source = tmp_path / "source"
    copy = ["setup.cfg", "pyproject.toml", "README.md", "hybridrl", "conf"]
    source.mkdir()
    subprocess.run(["cp", "-r", *[str(REPO / name) for name in copy], str(source)], check=True)
    subprocess.run([*build, "-w", str(tmp_path), str(source)], check=True, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    installed = tmp_path / "installed"
    subprocess.run([sys.executable, "-m", "zipfile", "-e", str(wheel), str(installed)], check=True)
    assert (installed / "hybridrl" / "conf" / "config.yaml").is_file()
    packages = {path.parent.relative_to(REPO) for path in (REPO / "hybridrl").rglob("__init__.py")}
    assert all((installed / package / "__init__.py").is_file() for package in packages)
    done = command("+recipe=gsm8k_ppo", "--cfg", "job", cwd=tmp_path, PYTHONPATH=str(installed))
    assert done.returncode == 0, done.stderr
    assert "name: gsm8k_ppo" in done.stdout
