"""Training stage: two real steps of the recipe with small sizes, in a process of its own."""

import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from hybridrl.config.checks.sizes import warm_ups
from hybridrl.config.choices import IN_PARTS
from hybridrl.config.command.overrides import quoted
from hybridrl.config.estimators import trains_on_answers
from hybridrl.config.planner.world import num_engines, training_ranks
from hybridrl.controller.ray.head import ray_address
from hybridrl.doctor.findings import Finding, fail, ok, skipped
from hybridrl.doctor.stages import CheckContext

CHECK = "training.steps"
STEPS = 2
MAX_RESPONSE_TOKENS = 32
TIMEOUT_S = 900.0
# Seconds between SIGINT and SIGKILL.
END_S = 30.0
LAST_LINES = 12


def check(context: CheckContext) -> list[Finding]:
    """Run the command with small sizes and judge how it ended."""
    if not context.config.doctor.minimal_training:
        return [skipped(CHECK, "all", "doctor.minimal_training=false")]
    if context.config.cluster.nodes > 1 and ray_address() is None:
        return [skipped(CHECK, "all", "Ray does not run yet")]
    with tempfile.TemporaryDirectory(prefix="hybridrl-doctor-") as folder:
        own = [] if context.config_dir is None else [f"--config-dir={context.config_dir}"]
        main = [sys.executable, "-m", "hybridrl.main", *own]
        command = [*main, *context.overrides, *shrunk(context, Path(folder) / "run")]
        return [_outcome(command, Path(folder) / "output.log")]


def shrunk(context: CheckContext, run_dir: Path) -> list[str]:
    """Return overrides for a short run: few prompts, short responses, no files kept."""
    config = context.config
    trainers = training_ranks(config)
    prompts = trainers * -(-num_engines(config) // trainers)
    answers, longest = trains_on_answers(config), config.rollout.max_response_tokens
    # Reference answers stay as long as they are.
    tokens = longest if answers else min(MAX_RESPONSE_TOKENS, longest)
    buffer = config.algorithm.overlong.buffer_tokens
    return [
        *(f"{key}={_warm_up(key)}" for key, steps in warm_ups(config).items() if steps >= STEPS),
        *([f"algorithm.overlong.buffer_tokens={tokens}"] if buffer > tokens else []),
        *(["rollout.max_in_flight=null"] if config.rollout.schedule in IN_PARTS else []),
        f"trainer.total_steps={STEPS}",
        "trainer.epochs=null",
        f"data.prompts_per_step={prompts}",
        f"actor.mini_batch_size={prompts * config.rollout.responses_per_prompt}",
        "data.num_eval_problems=1",
        "eval.every_steps=0",
        "eval.greedy=false",
        "eval.samples=1",
        f"rollout.max_response_tokens={tokens}",
        "trainer.save_final_model=false",
        "trainer.samples_every_steps=0",
        "trainer.profile_steps=[]",
        "trainer.max_restarts=0",
        "checkpoint.every_steps=0",
        "checkpoint.keep_best=null",
        "resume=none",
        "run.dry=false",
        "tracking.tensorboard=false",
        "tracking.wandb_project=null",
        "tracking.mlflow_uri=null",
        "doctor=off",
        f"hydra.run.dir={quoted(str(run_dir))}",
    ]


def _warm_up(key: str) -> int:
    """Return the steps of a warm-up; the actor's exceeds the critic's steps alone, or is 0."""
    return STEPS - 1 if key == "trainer.critic_warmup_steps" else 0


def _outcome(command: list[str], log: Path) -> Finding:
    start = time.perf_counter()
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env=os.environ | {"COLUMNS": "160", "NO_COLOR": "1"},
        )
        try:
            code = process.wait(TIMEOUT_S)
        except BaseException as error:
            code = _end(process)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
    seconds = time.perf_counter() - start
    lines = [line.rstrip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    steps = [line for line in lines if line.startswith(f"step {STEPS}/{STEPS}")]
    if code == 0 and steps:
        passed = f"{STEPS} steps in {seconds:.0f} s, start included: {steps[-1]}"
        return ok(CHECK, "all", passed)
    evidence = f"exit code {code} after {seconds:.0f} s:\n" + "\n".join(lines[-LAST_LINES:])
    again = shlex.join(part for part in command[1:] if not part.startswith("hydra.run.dir="))
    advice = f"Run the same command and read the logs of the workers: python {again}"
    return fail(CHECK, "all", evidence, advice)


def _end(process: subprocess.Popen[bytes]) -> int:
    """End a run by SIGINT, or by SIGKILL after END_S or a further signal; return its exit code."""
    process.send_signal(signal.SIGINT)
    try:
        return process.wait(END_S)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
        if isinstance(error, subprocess.TimeoutExpired):
            return code
        raise
