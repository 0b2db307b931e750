"""The page of a report in Chromium: each tab, filters, hover, damaged runs, hostile texts."""

import json
import shutil
import time
from pathlib import Path
from random import Random

import pytest

from hybridrl.report.page import write_report
from hybridrl.trainer.tracking.rollout_log import write_experts
from tests.support.run_folders import response, timeline, write_lines, write_run

pytestmark = pytest.mark.full

HOSTILE = "</script><script>document.title='x'</script><img src=x onerror=\"document.title='x'\">"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of 40 steps; conversations at step 40."""
    folder = write_run(tmp_path_factory.mktemp("runs") / "run", 40, prompts=4)
    file = folder / "rollouts" / "step_40.jsonl"
    records = [json.loads(line) for line in file.read_text().splitlines()]
    for step, shares in ((20, [0.5, 0.5]), (40, [0.75, 0.25])):
        write_experts(folder, step, [shares, [0.5, 0.5], [0.0, 1.0]])
    turns = [("assistant", "<calc>1+1</calc>"), ("tool", "2"), ("assistant", "It is 2.")]
    talk = [{"role": role, "text": text} for role, text in turns]
    write_lines(file, [record | {"turns": talk} for record in records])
    return folder


@pytest.fixture(scope="module")
def report(run):
    return write_report([run], run / "report.html")


@pytest.fixture(scope="module")
def opened(browser):
    """A function that opens a page; nothing but its file may be asked for, nothing may fail."""
    problems: list[str] = []
    context = browser.new_context(viewport={"width": 1400, "height": 900})

    def open_page(path: Path):
        page = context.new_page()
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda r: None if r.url.startswith("file:") else problems.append(r.url))
        page.goto(f"file://{path}")
        page.wait_for_selector("body[data-ready]")
        return page

    yield open_page
    context.close()
    assert problems == []


@pytest.fixture(scope="module")
def whole(opened, report):
    """The page of `report`."""
    return opened(report)


@pytest.fixture
def page(whole, request):
    """The same in the tab that the test's name begins with."""
    tab = request.node.name.split("_")[1]
    whole.click(f"[data-tab={tab}]")
    return whole


def numbers(page, column: int) -> list[float]:
    cells = page.locator(f"#table tbody td:nth-child({column})").all_text_contents()
    return [float(text) for text in cells]


def test_curves_show_the_load_of_each_expert_in_the_last_recorded_step(page):
    plot = page.locator("#experts .plot")
    assert page.locator("#experts h2").text_content() == "Load of experts, step 40"
    assert plot.evaluate("node => node.data[0].z") == [[1.5, 0.5], [1, 1], [0, 2]]
    assert plot.locator(".ytitle").text_content() == "layer"


def test_curves_zoom_together_are_smoothed_and_go_by_wall_time(page, report):
    reward, kl = page.locator(".plot").nth(0), page.locator(".plot", has_text="KL").first
    kl.locator(".xtitle").wait_for()
    assert reward.locator(".xtitle").text_content() == "step"
    data = "node => node.data.find(trace => trace.name).y"
    rows = [json.loads(line) for line in (report.parent / "metrics.jsonl").open()]
    assert reward.evaluate(data) == pytest.approx([row["reward/mean"] for row in rows], abs=1e-5)
    band = page.locator(".plot", has_text="95 % interval").first
    widths = band.evaluate("node => node.data.filter(t => t.fill).map(t => t.y[0])")
    assert widths == pytest.approx([0.16, 0.16])  # accuracy 0.2 - 0.04, sampled and greedy
    reward.evaluate("node => Plotly.relayout(node, {'xaxis.range': [10, 20]})")
    page.wait_for_timeout(100)
    assert kl.evaluate("node => node.layout.xaxis.range") == [10, 20]
    page.select_option("#x_axis", "wall")
    assert kl.evaluate("node => node.data[0].x.at(-1)") == pytest.approx(41 * 12.5 / 60)
    page.locator("#smoothing").fill("0.9")
    smooth = reward.evaluate(data)
    assert max(smooth) - min(smooth) < 0.5 * (
        max(r := [row["reward/mean"] for row in rows]) - min(r)
    )
    box = kl.bounding_box()
    page.mouse.move(box["x"] + 200, box["y"] + 120)
    assert kl.locator(".hoverlayer text").count() > 0
    names = "title => traces(panels.find((panel) => panel.title === title)).map((t) => t.name)"
    assert {*page.evaluate(names, "KL")} >= {"kl"}
    assert {*page.evaluate(names, "Learning rate")} >= {"actor/lr", "critic/lr"}


def test_responses_are_filtered_sorted_and_compared_over_time(page):
    count = page.locator("#count")
    total = 4 * (4 * 8 + 2 * 16)
    assert count.text_content().startswith(f"{total} of {total} responses")
    for name, value, left in [
        ("score_min", "1", 4 * 4 * 4),
        ("step_min", "20", 3 * 4 * 4),
        ("step_max", "30", 2 * 4 * 4),
        ("length_max", "3", 0),
        ("length_max", "", 2 * 4 * 4),
    ]:
        page.fill(f"[name={name}]", value)
        assert count.text_content().startswith(f"{left} of")
    page.check("[name=failed]")
    assert count.text_content().startswith("8 of")
    page.click("#filters [type=reset]")
    page.check("[name=truncated]")
    page.select_option("[name=kind]", "training")
    assert {*numbers(page, 3)} == {1.0} and page.locator("#table tbody tr").count() == 16
    page.uncheck("[name=truncated]")
    page.click("#table th:nth-child(3)")
    page.click("#table th:nth-child(3)")
    scores = numbers(page, 3)
    assert scores == sorted(scores, reverse=True) and scores[-1] == 0
    page.fill("[name=text]", "#### 143")  # prompt 70 of step 10
    assert page.locator("#table tbody tr").count() == 8
    page.click("#table tbody tr:nth-child(3)")
    assert "Mia has 70 pens" in page.locator("#detail").text_content()
    page.click("#all_samples")
    assert page.locator("#samples .card").count() == 8
    page.click("#filters [type=reset]")
    page.select_option("[name=kind]", "greedy")
    page.click("#table tbody tr:nth-child(3)")
    page.click("#all_samples")
    heads = page.locator("#samples .steps b").all_text_contents()
    assert heads == ["step 10", "step 20", "step 30", "step 40"]
    page.select_option("[name=kind]", "training")
    page.fill("[name=step_min]", "40")
    page.click("#table tbody tr:nth-child(1)")
    assert page.locator("#detail .turn pre").all_text_contents()[1:] == ["2", "It is 2."]
    page.click("#to_tokens")
    assert page.input_value("#tokens_step") == "40"


def test_tokens_are_coloured_by_a_quantity_and_hovering_shows_all(page):
    names = page.locator("#quantity option").all_text_contents()
    assert "ratio new / old" in names and "value" not in names  # the run has no critic
    page.select_option("#tokens_response", "1")
    page.select_option("#quantity", "clipped")
    spans = page.locator("#token_text span[data-index]")
    assert spans.count() == 40
    clear, paint = "rgba(0, 0, 0, 0)", "node => getComputedStyle(node).backgroundColor"
    colours = [spans.nth(index).evaluate(paint) for index in range(19)]
    assert [i for i, colour in enumerate(colours) if colour != clear] == [0, 9, 18]
    assert page.locator("#token_text .untrained").count() == 1
    spans.nth(9).hover()
    facts = dict(
        row.locator("th,td").all_text_contents() for row in page.locator("#token_facts tr").all()
    )
    assert facts["position"] == "9" and facts["clipped"] == "yes" and facts["advantage"] == "1"
    ratio = float(facts["ratio new / old"])
    difference = float(facts["new log-prob, after the step"]) - float(facts["old log-prob"])
    assert float(facts["new - old log-prob"]) == pytest.approx(difference, abs=1e-3)
    assert ratio == pytest.approx(2.718281828**difference, rel=1e-3)


def test_timeline_has_lanes_idle_time_and_who_was_waited_for(page):
    page.select_option("#timeline_step", "30")
    lanes = page.locator("#lanes .yaxislayer-above text").all_text_contents()
    assert sorted(lanes) == ["driver", "rank 0, idle 4.0 %", "rank 1, idle 8.8 %"]
    rows = [row.locator("td").all_text_contents() for row in page.locator("#waits tr").all()[1:]]
    # Rank 1 needs 5 % less: 0.3 of 6 s.
    assert rows[1] == ["rollout", "6.000", "0.150", "0.300", "rank 0, rollout.generate"]
    assert rows[-1][:2] == ["step", "12.500"]


def test_texts_that_try_to_be_html_are_shown_as_texts(opened, tmp_path):
    run = write_run(tmp_path / "run", 10, prompts=1)
    names = ("prompt", "question", "response", "answer", "failure")
    record = response(10, 0, 0, Random(0), 2) | dict.fromkeys(names, HOSTILE)
    talk = [{"role": HOSTILE, "text": HOSTILE}]
    write_lines(run / "rollouts" / "step_10.jsonl", [record, record | {"turns": talk}])
    write_lines(
        run / "timeline.jsonl",
        [
            json.loads(
                json.dumps(timeline(10, 1)).replace("rollout.generate", "<img src=x onerror=a>")
            )
        ],
    )
    (run / "main.log").write_text(f"[2026-01-01 10:00:00,000][x][ERROR] - {HOSTILE}\n")
    page = opened(write_report([run], run / "report.html"))
    assert HOSTILE in page.locator("pre.log").text_content()
    page.click("[data-tab=responses]")
    page.select_option("[name=kind]", "training")
    for row in (1, 2):
        page.click(f"#table tbody tr:nth-child({row})")
        assert page.locator("#detail pre").last.text_content() == HOSTILE
    page.click("#all_samples")
    page.click("[data-tab=tokens]")
    page.click("[data-tab=timeline]")
    assert page.locator("img").count() == 0 and page.title() == "made: report"


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["killed at step 1", "nothing", "NaN"])
def test_damaged_and_short_runs_have_a_page(opened, tmp_path, damage):
    run = write_run(tmp_path / "run", 1, every=1, prompts=1)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "result.json").unlink()
    if damage == "killed at step 1":
        (run / "metrics.jsonl").write_text(f'{lines[0]}\n{{"step": 1, "rew')
        shutil.rmtree(run / "rollouts")
        (run / "tokens" / "step_1.parquet").write_bytes(b"PAR1")
    elif damage == "nothing":
        shutil.rmtree(run)
        (run / ".hydra").mkdir(parents=True)
    else:
        nulls = dict.fromkeys(json.loads(lines[1])) | {"step": 1}
        (run / "metrics.jsonl").write_text(f"{lines[0]}\n{json.dumps(nulls)}\n")
        file = run / "rollouts" / "step_1.jsonl"
        file.write_text(file.read_text().replace('"score": 1.0', '"score": NaN'))
    page = opened(write_report([run], run / "report.html"))
    for tab in ("curves", "responses", "tokens", "timeline"):
        page.click(f"[data-tab={tab}]")
        assert page.locator(f"#{tab}").text_content().strip()
    state = "unknown" if damage == "nothing" else "killed"
    assert page.locator("h2 .state").text_content() == state
    assert page.locator("#failure").is_hidden()


def test_nothing_of_a_run_stays_beside_one_without_records(opened, tmp_path):
    """And its timeline comes back."""
    run = write_run(tmp_path / "run", 10, prompts=1)
    (tmp_path / "empty" / ".hydra").mkdir(parents=True)
    page = opened(write_report([run, tmp_path / "empty"], tmp_path / "report.html"))
    page.click("[data-tab=responses]")
    page.locator("#table tbody tr").first.click()
    page.click("#all_samples")
    shown = {
        "responses": "#detail, #samples",
        "tokens": "#legend",
        "timeline": "#waits, #lanes svg",
    }
    for tab, records in shown.items():
        page.click(f"[data-tab={tab}]")
        for index in ("0", "1"):
            page.select_option(f"#{tab}_run", index)
            there = "".join(page.locator(records).all_text_contents())
            assert bool(there) == (index == "0")
    page.select_option("#timeline_run", "0")
    assert page.locator("#lanes .yaxislayer-above text").count() == 3


@pytest.mark.slow
def test_a_thousand_steps_open_and_answer_in_seconds(opened, tmp_path):
    run = write_run(tmp_path / "run", 1000, words=200, tokens=500, ranks=16, others=100)
    path = write_report([run], run / "report.html")
    start = time.monotonic()
    page = opened(path)
    page.click("[data-tab=curves]")
    page.locator(".plot .xtitle").first.wait_for()
    page.click("[data-tab=responses]")
    page.fill("[name=step_min]", "1000")
    assert {*numbers(page, 1)} == {1000.0}
    page.click("[data-tab=tokens]")
    assert page.locator("#token_text span").count() == 500
    page.click("[data-tab=timeline]")
    assert page.locator("#lanes .yaxislayer-above text").count() == 17
    assert time.monotonic() - start < 20


@pytest.mark.slow
def test_a_sweep_is_compared_in_a_table_curves_and_parallel_coordinates(opened, tmp_path):
    for job, lr in enumerate(("1e-5", "1e-4")):
        overrides = ("+recipe=gsm8k_grpo", f"actor.optim.lr={lr}")
        write_run(tmp_path / str(job), 10 + job * 10, prompts=1, overrides=overrides)
    page = opened(write_report([tmp_path / "0", tmp_path / "1"], tmp_path / "report.html"))
    rows = [
        row.locator("th,td").all_text_contents() for row in page.locator("#runs_table tr").all()
    ]
    assert rows[0][:3] == ["run", "accuracy", "+-"] and rows[0][-1] == "actor.optim.lr"
    assert [row[-1] for row in rows[1:]] == ["0.0001", "1e-05"]  # best first
    assert page.locator("#parallel .axis-title").all_text_contents() == [
        "lr",
        "reward",
        "accuracy",
    ]
    page.click("[data-tab=curves]")
    plot = page.locator(".plot").first
    plot.locator(".xtitle").wait_for()
    assert plot.evaluate("node => node.data.map(trace => trace.x.length)") == [11, 21]
    styles = page.locator(".plot").nth(2).locator(".legendtext")
    styles.first.wait_for()
    assert styles.all_text_contents() == ["accuracy", "accuracy_greedy"]
    page.click("#run_legend button:first-child")
    assert plot.evaluate("node => node.data.map(trace => trace.x.length)") == [21]
    page.click("[data-tab=responses]")
    page.select_option("#responses_run", "1")
    assert {*numbers(page, 1)} == {10, 20}


@pytest.mark.slow
@pytest.mark.parametrize("width", [400, 1400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_tab_is_wider_than_the_window(browser, report, width, scheme):
    page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    page.goto(f"file://{report}")
    page.wait_for_selector("body[data-ready]")
    for tab in ("overview", "curves", "responses", "tokens", "timeline"):
        page.click(f"[data-tab={tab}]")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (paper == "rgb(255, 255, 255)") == (scheme == "light")
    page.close()
