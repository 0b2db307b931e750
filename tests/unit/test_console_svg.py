"""tools/console_svg.py: a command in a terminal as an animation."""

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]
SHOWN = r"printf '\033[1;32mfirst\033[0m <&>\n'; sleep 0.3; printf '\033[H\033[2Jlast\n'"


def frames(svg: Path) -> list[list[str]]:
    """Return the rows of each frame."""
    root = ElementTree.parse(svg).getroot()
    rows = {row.get("id"): "".join(row.itertext()) for row in root.iter() if row.tag.endswith("}g")}
    film = next(group for group in root.iter() if group.get("id") == "film")
    found = [[rows[use.get("href")[1:]] for use in frame] for frame in film]
    assert len(found) == 40
    return found


def test_a_command_becomes_frames_from_its_first_line_to_its_last(tmp_path):
    svg = tmp_path / "console.svg"
    tool = [sys.executable, str(ROOT / "tools" / "console_svg.py"), str(svg)]
    tool.append(str(tmp_path / "console.log"))
    (tmp_path / "show").write_text(SHOWN)
    subprocess.run([*tool, "bash", str(tmp_path / "show")], check=True, capture_output=True)
    *_, early, late = frames(svg)
    assert early == [f"$ bash {tmp_path}/show", "first <&>"]
    assert late == ["last"]
    drawn = svg.read_text()
    assert '<text x="0" fill="#7ddf8f" font-weight="bold" textLength="40">first</text>' in drawn
    subprocess.run(tool, check=True)
    assert svg.read_text() == drawn
