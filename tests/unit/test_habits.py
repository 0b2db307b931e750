"""Files for contributors: hooks run what `make lint` runs, the public CI calls `make test`."""

import re
from pathlib import Path

import pytest
import yaml

REPO = Path(__file__).resolve().parents[2]
MAKEFILE = (REPO / "Makefile").read_text()
TARGETS = set(re.findall(r"^(\w+):", MAKEFILE, re.MULTILINE))
HOOKS = yaml.safe_load((REPO / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
FORMS = sorted((REPO / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


def test_hooks_run_what_make_lint_runs():
    entries = {hook["entry"] for hook in HOOKS}
    of_make = MAKEFILE.replace("$(VENV)", ".venv")
    assert "make lint" in entries
    assert all(f"\t{entry}" in of_make for entry in entries - {"make lint"})


def test_the_public_ci_calls_make_test():
    workflow = yaml.safe_load((REPO / ".github" / "workflows" / "test.yml").read_text())
    steps = workflow["jobs"]["test"]["steps"]
    assert [step["run"] for step in steps if "run" in step][-1] == "make test"
    assert "test" in TARGETS
    # YAML reads `on` as true.
    assert workflow[True]["push"]["branches"] == ["main"]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.stem)
def test_an_issue_form_has_what_github_requires(form):
    fields = yaml.safe_load(form.read_text())
    assert fields.keys() == {"name", "description", "body"}
    assert all(field["attributes"]["label"] for field in fields["body"])
    ids = [field["id"] for field in fields["body"]]
    assert len(ids) == len(set(ids))


def test_links_of_these_pages_lead_to_files():
    for name in ("SECURITY.md", "CONTRIBUTING.md"):
        links = re.findall(r"\]\(([^)#:]+)\)", (REPO / name).read_text())
        assert links
        assert all((REPO / link).exists() for link in links)
