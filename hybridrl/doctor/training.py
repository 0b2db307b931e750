"""Two real steps of the recipe, shrunk: what no check of a part can say."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from hybridrl.config.checks.sizes import warm_ups
from hybridrl.config.planner.world import world_size
from hybridrl.controller.ray.head import ray_address
from hybridrl.doctor.findings import Finding, fail, ok, skipped
from hybridrl.doctor.stages import Case

CHECK = "training.steps"
STEPS = 2
MAX_RESPONSE_TOKENS = 32
TIMEOUT_S = 900.0
# Seconds that a run which is told to end may take.
END_S = 30.0
LAST_LINES = 12


def check(case: Case) -> list[Finding]:
    """Run the command itself in a process of its own, and read how it ended."""
    if not case.config.doctor.minimal_training:
        return [skipped(CHECK, "all", "doctor.minimal_training=false")]
    if case.config.cluster.nodes > 1 and ray_address() is None:
        return [skipped(CHECK, "all", "Ray does not run yet")]
    with tempfile.TemporaryDirectory(prefix="hybridrl-doctor-") as folder:
        run_dir = Path(folder) / "run"
        own = [] if case.config_dir is None else [f"--config-dir={case.config_dir}"]
        main = [sys.executable, "-m", "hybridrl.main", *own]
        command = [*main, *case.overrides, *shrunk(case, run_dir)]
        return [_outcome(command, Path(folder) / "output.log")]


def shrunk(case: Case, run_dir: Path) -> list[str]:
    """Overrides that make a run short: few prompts, short responses, nothing kept."""
    config = case.config
    prompts = world_size(config)
    responses = config.rollout.responses_per_prompt
    tokens = min(MAX_RESPONSE_TOKENS, config.rollout.max_response_tokens)
    buffer = config.algorithm.overlong.buffer_tokens
    return [
        *(f"{key}={STEPS - 1}" for key, steps in warm_ups(config).items() if steps >= STEPS),
        *([f"algorithm.overlong.buffer_tokens={tokens}"] if buffer > tokens else []),
        f"trainer.total_steps={STEPS}",
        f"data.prompts_per_step={prompts}",
        f"actor.mini_batch_size={prompts * responses}",
        "data.num_eval_problems=1",
        "eval.every_steps=0",
        "eval.greedy=false",
        f"rollout.max_response_tokens={tokens}",
        "trainer.save_final_model=false",
        "trainer.samples_every_steps=0",
        "trainer.profile_steps=[]",
        "trainer.max_restarts=0",
        "checkpoint.every_steps=0",
        "checkpoint.keep_best=null",
        "resume=none",
        "tracking.tensorboard=false",
        "tracking.wandb_project=null",
        "tracking.mlflow_uri=null",
        "doctor=off",
        f"hydra.run.dir={run_dir}",
    ]


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
        except subprocess.TimeoutExpired:
            code = _end(process)
        except BaseException:
            _end(process)
            raise
    seconds = time.perf_counter() - start
    lines = [line.rstrip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    steps = [line for line in lines if line.startswith(f"step {STEPS}/{STEPS}")]
    if code == 0 and steps:
        return ok(CHECK, "all", f"{STEPS} steps in {seconds:.0f} s, start included: {steps[-1]}")
    said = "\n".join(lines[-LAST_LINES:])
    return fail(
        CHECK,
        "all",
        f"exit code {code} after {seconds:.0f} s:\n{said}",
        "Run the same yourself and read the workers' logs: " + " ".join(_short(command)),
    )


def _end(process: subprocess.Popen[bytes]) -> int:
    """Have a run leave as Ctrl-C does, or else kill it; its exit code."""
    process.send_signal(signal.SIGINT)
    try:
        return process.wait(END_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.wait()


def _short(command: list[str]) -> list[str]:
    kept = [part for part in command[1:] if not part.startswith("hydra.run.dir=")]
    return ["python", *(f"'{part}'" if set("[]{} ,") & set(part) else part for part in kept)]
