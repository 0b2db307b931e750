"""docs/troubleshooting.md and docs/multi_node.md: every check, message, key and port exists."""

import ast
import re
import shlex

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from hybridrl.config.command.command_line import parse_argv
from hybridrl.config.command.overrides import precompose
from hybridrl.config.keys import leaves
from hybridrl.controller.ray.runtime import PASSED_ON
from hybridrl.doctor.findings import CHECKS
from hybridrl.main import conf_dir
from tests.support.deploy_stubs import REPO

TROUBLES = (REPO / "docs/troubleshooting.md").read_text()
NODES = (REPO / "docs/multi_node.md").read_text()
# Number and text of each of the twelve sections, and its lines by their labels.
SECTIONS = {
    int(number): text
    for number, text in re.findall(r"^## (\d+)\. (.*?)(?=^## )", TROUBLES, re.MULTILINE | re.DOTALL)
}
ENTRIES = {
    number: dict(re.findall(r"^- \*\*(\w+):\*\* (.*?)(?=^- |\n\n)", text, re.MULTILINE | re.DOTALL))
    for number, text in SECTIONS.items()
}
CODE = re.compile(r"`([^`\n]+)`")
# What each of the twelve is about: a word that its section cannot do without, and its main check.
ITEMS = {
    1: ("init_process_group", "network.rendezvous"),
    2: ("remote process exited or there was a network error", "network.interfaces"),
    3: ("tensor_parallel_size", "placement.engines"),
    4: ("all-gather", "network.collective"),
    5: ("ray status", "ray.loopback"),
    6: ("InfiniBand", "network.infiniband"),
    7: ("expandable_segments", "host.allocator"),
    8: ("pinned", "memory.host"),
    9: ("/dev/shm", "host.shm"),
    10: ("debug", "ray.version"),
    11: ("token", "ray.token"),
    12: ("cache", "inputs.cache"),
}


# A value in a message: of str.format, or of logging.
VALUE = re.compile(r"\{[^{}]*\}|%[sdgr]|%\.\d+f")


def messages() -> list[str]:
    """All texts in the package's code, with `...` for each value."""
    trees = [ast.parse(file.read_text()) for file in (REPO / "hybridrl").rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    texts = [
        "".join(part.value if isinstance(part, ast.Constant) else "..." for part in node.values)
        for node in nodes
        if isinstance(node, ast.JoinedStr)
    ]
    constants = [node.value for node in nodes if isinstance(node, ast.Constant)]
    texts += [value for value in constants if isinstance(value, str)]
    texts += [file.read_text() for file in (REPO / "hybridrl").rglob("*.yaml")]
    return [" ".join(VALUE.sub("...", text).split()) for text in texts]


def commands(page: str) -> list[list[str]]:
    """The arguments of every hybridrl.main and hybridrl.doctor in a page's code blocks."""
    blocks = "\n".join(
        line for line in page.replace("\\\n", " ").splitlines() if line[:4] == "    "
    )
    found = re.findall(r"-m hybridrl\.(?:main|doctor)(.*)", blocks)
    return [shlex.split(text, comments=True) for text in found]


def test_each_of_the_twelve_has_a_section_with_its_check():
    assert list(SECTIONS) == list(ITEMS)
    for number, (word, check) in ITEMS.items():
        assert word in SECTIONS[number], number
        assert f"`{check}`" in ENTRIES[number]["Checks"], number


def test_every_section_is_whole_and_its_checks_exist():
    for number, entry in ENTRIES.items():
        assert list(entry) == ["Checks", "Cause", "Do"], number
        checks = CODE.findall(entry["Checks"])
        assert checks, number
        assert [check for check in checks if check not in CHECKS] == []


def test_every_check_leads_somewhere():
    """Who reads an id in the doctor's report finds its section, or its row in the table."""
    named = {check for entry in ENTRIES.values() for check in CODE.findall(entry["Checks"])}
    named |= {*re.findall(r"^\| `(\S+)` \|", TROUBLES, re.MULTILINE)}
    assert set(CHECKS) == named


def test_every_message_of_one_machine_is_printed_by_the_code():
    """Messages stand in the first column, with `...` for values; symptoms have no blank in them."""
    part = TROUBLES[TROUBLES.index("## One machine") : TROUBLES.index("## Several nodes")]
    cells = re.findall(r"^\| (.*?) \| ", part, re.MULTILINE)
    quoted = [text for cell in cells for text in CODE.findall(cell) if " " in text]
    assert len(quoted) > 30
    known = messages()
    assert [text for text in quoted if not any(text in message for message in known)] == []


@pytest.mark.parametrize("page", [TROUBLES, NODES], ids=["troubleshooting", "multi_node"])
def test_every_key_it_names_exists(page):
    with initialize_config_dir(config_dir=str(conf_dir()), version_base="1.3"):
        config = compose("config", ["hardware=cpu"])
    keys = set(leaves(OmegaConf.to_container(config, resolve=False)))
    words = {word.partition("=")[0] for text in CODE.findall(page) for word in text.split()}
    groups = tuple(f"{group}." for group in config)
    named = {word for word in words if word.startswith(groups)} - set(CHECKS)
    named = {word for word in named if not word.endswith((".json", ".sh"))}
    assert len(named) >= 1
    assert named - keys == set()


@pytest.mark.parametrize("page", [TROUBLES, NODES], ids=["troubleshooting", "multi_node"])
def test_every_command_composes(page):
    found = commands(page)
    assert found
    for arguments in found:
        overrides = [a for a in arguments if "=" in a or a == "-m"]
        line = parse_argv(overrides)
        line.overrides.extend([] if "hardware=gpu" in overrides else ["hardware=cpu"])
        assert precompose(line, conf_dir()).problems == [], arguments


def test_the_ports_are_those_of_the_scripts():
    script = (REPO / "deploy/node.sh").read_text()
    assert "${HYBRIDRL_RAY_PORT:-6379}" in script
    assert "${HYBRIDRL_DOCTOR_PORT:-29600}" in script
    options = dict(re.findall(r"--([a-z-]+)=\"?\$\(ray_port (\d)\)", script))
    assert len(options) == 8
    rows = " ".join(line.split("|")[1] for line in NODES.splitlines() if line.startswith("| "))
    ports = {int(number) for number in re.findall(r"\d{4,5}", rows)}
    assert {6379 + int(offset) for offset in options.values()} <= ports
    for flag, last in (("min-worker-port", 10002), ("max-worker-port", 19999)):
        assert f"--{flag}={last}" in script
        assert last in ports


def test_the_variables_are_those_that_the_program_passes_on_and_the_scripts_read():
    part = NODES[NODES.index("## Environment variables") : NODES.index("## Sweeps")]
    named = [word for word in CODE.findall(part) if word != "CUDA_VISIBLE_DEVICES"]
    assert [word for word in named if not word.startswith("HYBRIDRL_S")] == list(PASSED_ON)
    scripts = "".join(file.read_text() for file in (REPO / "deploy").rglob("*.s[hb]*"))
    read = set(re.findall(r"\$\{(HYBRIDRL_[A-Z_]+):", scripts))
    own = {"HYBRIDRL_DEPLOY", "HYBRIDRL_DEV", "HYBRIDRL_SYS", "HYBRIDRL_CALLED_BY_SSH"}
    assert sorted(name for name in read - own if name not in NODES) == ["HYBRIDRL_NAME"]


def test_the_files_it_names_exist():
    found = set(re.findall(r"(?<![\w/])deploy/[\w./]+\w", NODES + TROUBLES))
    assert len(found) >= 6
    assert [name for name in sorted(found) if not (REPO / name).exists()] == []
