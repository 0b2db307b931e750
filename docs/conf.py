"""Sphinx configuration of the documentation: `make docs` writes the site to build/docs.

The source folder is the repository, so that links between pages, recipes and files are the same
here as on a code host.
"""

import sys
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from config_reference import config_reference  # noqa: E402

import hybridrl  # noqa: E402

project = "hybridrl"
release = hybridrl.__version__
default_role = "code"
root_doc = "docs/index"
include_patterns = [
    "docs/**.md",
    "recipes/*/README.md",
    "benchmarks/RESULTS.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
]
exclude_patterns = ["build", ".venv"]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 3
autodoc_typehints = "description"
autodoc_member_order = "bysource"
napoleon_use_ivar = True
html_theme = "furo"
html_title = f"hybridrl {release}"
html_additional_pages = {"index": "to_start.html"}
templates_path = ["_site"]
html_static_path = ["_site"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_show_copyright = False

# Line of a page that the reference of all config keys replaces.
CONFIG_REFERENCE = "<!-- config reference -->"


def insert_config_reference(app: Sphinx, page: str, source: list[str]) -> None:
    """Write the tables of all config keys into the page that has the line for them."""
    if CONFIG_REFERENCE in source[0]:
        source[0] = source[0].replace(CONFIG_REFERENCE, config_reference(ROOT / "conf"))


def escape_bars(*arguments: Any) -> None:
    """Keep |x| in formulas of docstrings, which reStructuredText would replace."""
    lines: list[str] = arguments[-1]
    lines[:] = [line.replace("|", "\\|") for line in lines]


def setup(app: Sphinx) -> None:
    """Connect what is above."""
    app.connect("source-read", insert_config_reference)
    app.connect("autodoc-process-docstring", escape_bars)
