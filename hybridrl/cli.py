"""The command `hybridrl <command>`."""

import difflib
import importlib
import sys

from hybridrl.controller.output import guard_standard_output

USAGE = """usage: hybridrl <command> [arguments]

  init     write a folder with a reward, data and a recipe of your own
  check    show what a run would read and reward, and its model before training
  train    python -m hybridrl.main: one run, or with -m a sweep
  plan     does a run fit, what helps, how long does a step take: gpus=8x80GB
  doctor   python -m hybridrl.doctor: check the machines and the config before a run
  export   write a checkpoint as a folder for transformers and vLLM
  eval     score a checkpoint or a model on a data set: pass@1, pass@k, completions
  serve    serve a checkpoint or a model at the endpoint of agents
  tinker   serve a model to tinker's SDK: training loops of your own
  replay   find the responses that make an update NaN or infinite
  resume   go on with a run, without typing its command again
  runs     list runs: step, accuracy, state, path
  report   one HTML file of runs: curves, responses, tokens, timeline

hybridrl train +recipe=gsm8k_ppo, hybridrl <any other> --help
"""
EXIT_USAGE = 2
# command -> the module with its `main`, imported only then
COMMANDS = {
    "init": "hybridrl.commands.init",
    "check": "hybridrl.commands.check",
    "train": "hybridrl.main",
    "plan": "hybridrl.commands.plan",
    "doctor": "hybridrl.doctor.main",
    "export": "hybridrl.commands.export",
    "eval": "hybridrl.commands.evaluate",
    "serve": "hybridrl.commands.serve",
    "tinker": "hybridrl.commands.tinker",
    "replay": "hybridrl.commands.replay",
    "resume": "hybridrl.commands.resume",
    "runs": "hybridrl.commands.runs",
    "report": "hybridrl.commands.report",
}


def main() -> None:
    """Run the command of the first argument with the remaining arguments."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name in ("-h", "--help"):
        sys.stdout.write(USAGE)
        return
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        meant = f" Did you mean {near[0]}?\n" if near else f"\n\n{USAGE}"
        sys.stderr.write(f"no command {name}.{meant}" if name else USAGE)
        sys.exit(EXIT_USAGE)
    del sys.argv[1]
    guard_standard_output()
    importlib.import_module(COMMANDS[name]).main()


if __name__ == "__main__":
    main()
