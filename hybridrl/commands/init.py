"""`hybridrl init`: writes the folder of a task of one's own, which trains as it stands."""

import json
import re
import sys
from pathlib import Path

from hybridrl.app.compose import conf_dir
from hybridrl.commands.running import UsageError, argument, parsed, run_command
from hybridrl.data.sources.problems import train_problems

DESCRIPTION = """\
Write a folder with a reward, its test, data and a recipe, which trains as it stands.

  hybridrl init my_task
  cd my_task
  hybridrl check +recipe=my_task
  hybridrl train +recipe=my_task
"""
TEMPLATE = Path(__file__).with_name("task")
# File of the template -> file of the task; TASK is its name.
FILES = {
    "README.md": "README.md",
    "recipe.yaml": "recipe/TASK.yaml",
    "reward.py": "reward.py",
    "test_reward.py": "test_reward.py",
}
DATA = "data.jsonl"
NUM_PROBLEMS = 1000


def main() -> None:
    """Run the command; exits by SystemExit unless all goes well."""
    folder = argument("folder", type=Path, metavar="FOLDER", help="new; its name is the task's")
    args = parsed("init", DESCRIPTION, folder)
    run_command(lambda: _write(args.folder))


def _write(folder: Path) -> None:
    """Write the task's files; the folder must be new or empty."""
    name = folder.resolve().name
    if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
        raise UsageError(
            f"{folder}: {name!r} is no name of a task, expected letters, digits and underscores."
        )
    if (conf_dir() / "recipe" / f"{name}.yaml").exists():
        raise UsageError(f"{folder}: hybridrl has a recipe of this name.\nUse another name.")
    try:
        if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
            raise UsageError(f"{folder}: it exists and is not an empty folder.\nUse a new folder.")
        for source, target in FILES.items():
            file = folder / target.replace("TASK", name)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text((TEMPLATE / source).read_text().replace("TASK", name))
        rows = [
            {"question": problem["question"], "answer": problem["answer"].rpartition("#### ")[2]}
            for problem in train_problems(NUM_PROBLEMS)
        ]
        (folder / DATA).write_text("".join(json.dumps(row) + "\n" for row in rows))
    except OSError as error:
        raise UsageError(f"{folder} cannot be written: {error.strerror}.") from error
    sys.stdout.write(
        f"{folder} has a task that trains as it stands. Next:\n\n"
        f"  cd {folder}\n"
        f"  hybridrl check +recipe={name}\n"
        f"  hybridrl train +recipe={name}\n"
    )
