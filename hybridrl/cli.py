"""The command `hybridrl`: one word for each of the program's commands."""

import sys
from collections.abc import Callable

USAGE = """usage: hybridrl <command> [arguments]

  train    python -m hybridrl.main: one run, or with -m a sweep
  doctor   python -m hybridrl.doctor: check the machines and the config before a run
  export   write a checkpoint as a folder that transformers and vLLM load
  eval     score a checkpoint or a model on a data set: pass@1, pass@k, completions
  replay   repeat the batch that a run was stopped for

hybridrl train +recipe=gsm8k_ppo, hybridrl <any other> --help
"""
EXIT_USAGE = 2


def main() -> None:
    """Run the command that the first argument names, on the arguments behind it."""
    commands: dict[str, Callable[[], None]] = {
        "train": _train,
        "doctor": _doctor,
        "export": _export,
        "eval": _eval,
        "replay": _replay,
    }
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name in ("-h", "--help"):
        sys.stdout.write(USAGE)
        return
    if name not in commands:
        sys.stderr.write(USAGE)
        sys.exit(EXIT_USAGE)
    del sys.argv[1]
    commands[name]()


def _train() -> None:
    from hybridrl.main import main

    main()


def _doctor() -> None:
    from hybridrl.doctor.main import main

    main()


def _export() -> None:
    from hybridrl.commands.export import main

    main()


def _eval() -> None:
    from hybridrl.commands.evaluate import main

    main()


def _replay() -> None:
    from hybridrl.commands.replay import main

    main()


if __name__ == "__main__":
    main()
