"""Writes docs/models.md's table of checks from what tests ran.

    python -m pytest <files of CHECKS> --junitxml=/tmp/one.xml
    python tools/models_table.py /tmp/one.xml /tmp/another.xml

A cell has the number of cases that passed, of a family's tiny models.
"""

import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from xml.etree import ElementTree

from tests.support.tiny_hf import ALL

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
BEGIN, END = "<!-- written by tools/models_table.py -->", "<!-- end -->"
# Columns: patterns of the names of the tests whose cases a cell counts.
CHECKS = {
    "forward": "test_packed_equals_each_sequence_alone",
    "log-probs": "test_log_probs_are_those_of_from_pretrained",
    "gradient": "test_gradient_of_every_family",
    "compiled layers": "test_compiled_(layers|experts)_train_.*_ratio_is_one",
    "shared sequences": r"test_sequence_parallel\.test_every_family",
    "first ratio": r"test_first_ratio_is_one\.test_every_family",
    "reshard, tp 1": "test_reshard_of_every_family.*-tp1-",
    "reshard, tp 2": "test_reshard_of_every_family.*-tp2-",
    "saved model": "test_a_saved_folder_loads_to_the_same_bits",
    "exported model": "test_transformers_and_vllm_load_what_was_trained",
    "plan": "test_(sizes_of_every_family_are|what_layers_keep_is)_",
}


def cases(files: Iterable[Path]) -> Iterator[tuple[str, str, bool]]:
    """Yield the cases of CHECKS that ran: model_type, column, passed."""
    for file in files:
        for case in ElementTree.parse(file).getroot().iterfind(".//testcase[@name]"):
            chosen = case.attrib["name"].partition("[")[2]
            path = f"{case.attrib['classname']}.{case.attrib['name']}"
            column = next((c for c, tests in CHECKS.items() if re.search(tests, path)), None)
            kinds = {ALL[part].model_type for part in re.findall(r"\w+", chosen) if part in ALL}
            if column and len(kinds) == 1 and case.find("skipped") is None:
                is_bad = case.find("failure") is not None or case.find("error") is not None
                yield kinds.pop(), column, not is_bad


def table(results: Iterable[tuple[str, str, bool]]) -> str:
    """Return the rows of docs/models.md."""
    counts = Counter(results)
    kinds = dict.fromkeys(config.model_type for config in ALL.values())
    lines = ["| `model_type` | " + " | ".join(CHECKS) + " |", "|---" * (len(CHECKS) + 1) + "|"]
    for kind in kinds:
        cells = []
        for column in CHECKS:
            passed, failed = counts[kind, column, True], counts[kind, column, False]
            all_passed = str(passed or "")
            cells.append(f"{failed} of {passed + failed} failed" if failed else all_passed)
        lines.append(f"| `{kind}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    before, _, rest = PAGE.read_text().partition(BEGIN)
    rows = table(cases(map(Path, sys.argv[1:])))
    PAGE.write_text(f"{before}{BEGIN}\n\n{rows}\n\n{END}{rest.partition(END)[2]}")
