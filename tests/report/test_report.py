"""The page of a run, in a real browser: what it draws is what the run's files say, whatever is written in them."""

import json
import re
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests
import torch
import uvicorn
from playwright.sync_api import Browser

from arborl.cli import main
from arborl.compare import Cell, Comparison, Protocol, write
from arborl.compare.results import Point, Row
from arborl.config import load_config, read_config, save_config
from arborl.core.losses import LOSSES, Awm, Dppo, Guard, Nft, Surrogate
from arborl.engine.method import plan_at
from arborl.report import read, write_report
from arborl.report.data import MAX_ROWS, _as_the_run_saw, _some, columns
from arborl.report.live import app
from arborl.report.page import render
from arborl.report.pictures import evenly, evenly_within
from arborl.run.folder import read_metrics
from arborl.run.trees import TreeFile
from arborl.trainer import train

from browser import NARROW, WIDE, Opened, chromium, needs_browser

EVIL = "</script><script>window.hacked=1</script><img src=x onerror='window.hacked=2'> a & \"b\" ${1} {{ 7*7 }}"


def evil(images, prompts, columns):
    """A reward whose parts have names of its own making."""
    bright = images.flatten(1).mean(1)
    return {"<b onmouseover=hack()>red</b>": images[:, 0].flatten(1).mean(1), "all": bright}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real run of three epochs, every one recorded and evaluated, two optimizer steps each."""
    here = tmp_path_factory.mktemp("report")
    (here / "prompts.txt").write_text(f"{EVIL}\n{EVIL} again\n", encoding="utf-8")
    settings = [
        "train.epochs=3",
        "log.record_every=1",
        "eval.every=1",
        "eval.num_prompts=3",
        "eval.rewards=[jpeg]",
        "sample.num_prompts=2",
        "train.updates=2",
        "train.schedule=linear",
        "sample.num_steps=6",
        "tree.w=2",
        "tree.s=1",
        "tree.tou=1",
        "rewards=none",
        f"rewards.own.fn={__name__}:evil",
        f"prompts.path={here / 'prompts.txt'}",
        f"log.dir={here}",
        "log.trackers=[]",
        "run_name=seen",
    ]
    return train(load_config("tree", settings))


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


def tree_at(run: Path, epoch: int) -> TreeFile:
    return TreeFile.load(run / "trees" / f"epoch_{epoch:06d}")


def shown(value: float, digits: int = 5) -> float:
    """A number as the page rounds it."""
    return float(f"{value:.{digits}g}")


def number(text: str) -> float:
    return float(text.replace(",", "").split()[0])


def details(page: Opened) -> dict[str, str]:
    found = page.page.locator(".details [data-value]").all()
    return {str(item.get_attribute("data-value")): item.inner_text() for item in found}


@needs_browser
def test_the_page_opens_from_disk_and_asks_for_nothing(run: Path, browser: Browser):
    assert (run / "report.html").is_file(), "made at the end of a run"
    page = Opened(browser, run / "report.html", WIDE)
    assert page.complaints == []
    assert page.requests == [(run / "report.html").resolve().as_uri(), *(r for r in page.requests if r[:5] == "data:")]
    assert not page.overflows
    for name in ("curves", "tree", "pictures", "rewards", "watch", "update", "time", "settings"):
        assert page.page.locator(f"#{name}").is_visible(), name
    first, last = read_metrics(run)[0], read_metrics(run)[-1]
    for row in (first, last):
        assert str(shown(row["eval/own"])) in page.text("#head .headline")
    assert page.count("#pictures .pair") == 3
    assert page.count("#pictures .pair img") == 6, "before and after"
    assert page.count('#update svg[aria-label="learning rate"]') == 1
    page.page.locator("#settings summary").click()
    assert page.page.get_by_role("cell", name="tree.w", exact=True).count() == 2


@needs_browser
def test_the_tree_is_the_plan_and_the_slider_goes_through_the_epochs(run: Path, browser: Browser):
    page = Opened(browser, run / "report.html", WIDE)
    config, slider = read_config(run / "config.yaml"), page.page.locator("#tree-epoch")
    slider.focus()
    windows: set[str] = set()
    for epoch in (2, 1, 0):
        plan = plan_at(config, epoch)
        assert f"epoch {epoch}" in page.text("#tree-prompt")
        assert page.count("#tree .node") == plan.nodes
        assert page.count("#tree .edge") == plan.edges
        assert page.count("#tree .node image") == len(plan.preview_nodes)
        assert page.count("#tree .window") == 1
        windows.add(page.text("#tree .window-label"))
        scores = page.page.locator("#tree .node .score").all_text_contents()
        assert sorted(scores) == sorted(f"{s:.3f}" for s in tree_at(run, epoch).scores["total"].tolist())
        row = read_metrics(run)[epoch]
        for name in ("rewards/own/mean", "ratio", "clip_ratio", "advantage_abs"):
            assert number(page.text(f'[data-metric="{name}"]')) == pytest.approx(shown(row[name])), name
        slider.press("ArrowLeft")
    assert len(windows) == 2, "the window moves, and so does its mark"
    page.page.get_by_label("next tree").click()
    assert "epoch 1" in page.text("#tree-prompt")


@needs_browser
def test_hovering_tells_what_the_files_say(run: Path, browser: Browser):
    page = Opened(browser, run / "report.html", WIDE)
    tree = tree_at(run, 2)
    for edge in (int(tree.plan.stochastic.nonzero()[0]), int(tree.plan.stochastic.nonzero()[-1]), tree.plan.edges - 1):
        page.page.locator(f'#tree .node[data-node="{tree.plan.roots + edge}"]').hover()
        told = details(page)
        assert number(told["advantage"]) == pytest.approx(shown(float(tree.advantage[edge])))
        assert ("log_density" in told) == bool(tree.plan.stochastic[edge])
        if tree.plan.stochastic[edge]:
            assert number(told["log_density"]) == pytest.approx(float(tree.log_density[edge]), rel=1e-6)
            assert number(told["ratio"]) == pytest.approx(float(tree.ratio[edge]), rel=1e-6)
    leaf = int(tree.plan.leaves[3])
    page.page.locator(f'#tree .node[data-node="{leaf}"]').hover()
    assert number(details(page)["score-own"]) == pytest.approx(shown(float(tree.scores["own"][3])))
    edge = int(tree.plan.stochastic.nonzero()[0])
    page.page.locator(f'#tree .edge[data-edge="{edge}"] .hit').dispatch_event("pointerenter")
    assert number(details(page)["value"]) == pytest.approx(below_mean(tree, edge), abs=1e-4)
    chart = page.page.locator("#curves svg").first
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    assert box
    for epoch, across in ((0, 54), (3, box["width"] - 16)):
        page.page.mouse.move(box["x"] + across, box["y"] + box["height"] / 2)
        tip = page.page.locator('#curves [aria-label="tip"] text').first
        tip.wait_for()
        row = read_metrics(run)[epoch]
        assert f"epoch {epoch}" in tip.text_content()
        assert f"prompts, by ODE {shown(row['eval/own'])} ± {shown(row['eval/own_stderr'], 2)}" in tip.text_content()
        if "reward" in row:
            expected = f"training leaves {shown(row['rewards/own/mean'])} ± {shown(row['rewards/own/stderr'], 2)}"
            assert expected in tip.text_content()


def below_mean(tree: TreeFile, edge: int) -> float:
    inside = {tree.plan.roots + edge}
    for other, parent in enumerate(tree.plan.parent.tolist()):
        if parent in inside:
            inside.add(tree.plan.roots + other)
    return sum(
        float(s) for leaf, s in zip(tree.plan.leaves.tolist(), tree.scores["total"], strict=True) if leaf in inside
    ) / len(inside & {*tree.plan.leaves.tolist()})


@needs_browser
def test_the_keyboard_walks_the_tree(run: Path, browser: Browser):
    page = Opened(browser, run / "report.html", WIDE)
    tree = tree_at(run, 2)
    svg = page.page.locator('svg[role="tree"]')
    svg.focus()

    def press(key: str) -> int:
        page.page.keyboard.press(key)
        return int(str(page.page.locator('svg[role="tree"]').get_attribute("aria-activedescendant"))[5:])

    assert press("Home") == 0
    child = press("ArrowRight")
    assert int(tree.plan.parent[child - tree.plan.roots]) == 0
    deep = press("ArrowRight")
    while int(tree.plan.depth[deep]) < int(tree.plan.depth.max()):
        deep = press("ArrowRight")
    assert int(tree.plan.depth[press("ArrowDown")]) == int(tree.plan.depth[deep])
    assert press("ArrowUp") == deep
    assert int(tree.plan.depth[press("ArrowLeft")]) == int(tree.plan.depth[deep]) - 1
    best = int(tree.plan.leaves[tree.scores["total"].argmax()])
    assert press("End") == best
    page.page.keyboard.press("PageUp")
    assert "epoch 1" in page.text("#tree-prompt")
    assert press("Home") == 0, "the keyboard stays on the tree"


@needs_browser
def test_a_phone_and_paper(run: Path, browser: Browser):
    page = Opened(browser, run / "report.html", NARROW)
    assert page.complaints == []
    assert not page.overflows
    plan = plan_at(read_config(run / "config.yaml"), 2)
    assert page.count("#tree .node") == plan.nodes
    page.page.locator("#tree .note").last.scroll_into_view_if_needed()
    tree, told = page.page.locator("#tree svg").bounding_box(), page.page.locator("#tree .details").bounding_box()
    assert tree
    assert told
    assert tree["width"] <= NARROW["width"]
    assert told["y"] >= tree["y"] + tree["height"] - 1, "numbers come below the tree"
    page.page.set_viewport_size({"width": 1000, "height": 800})
    page.wait_for("document.querySelector('#tree svg').clientWidth > 500")
    page.page.emulate_media(media="print")
    assert page.page.locator("#tree-epoch").is_hidden()
    assert page.page.locator("#tree svg").is_visible()
    assert page.page.pdf()[:5] == b"%PDF-"


@needs_browser
def test_what_is_written_in_prompts_and_rewards_is_text(run: Path, browser: Browser):
    page = Opened(browser, run / "report.html", WIDE)
    assert page.page.evaluate("window.hacked") is None
    assert page.count('img[src="x"]') == 0
    assert page.count("[onmouseover]") == 0
    assert page.text("#tree-prompt").endswith(f"“{tree_at(run, 2).prompt}”")
    assert EVIL in page.text("#tree-prompt")
    assert EVIL in page.text("#pictures .prompt")
    assert "<b onmouseover=hack()>red</b>" in page.text("#rewards")
    html = (run / "report.html").read_text(encoding="utf-8")
    assert "window.hacked=1</script>" not in html
    # And if something had slipped through: only the page's own scripts may run, and nothing may be fetched.
    page.page.evaluate("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.hacked = 3\">')")
    page.page.evaluate("fetch('https://example.org/').catch(() => (window.refused = true))")
    page.wait_for("window.refused")
    assert page.page.evaluate("window.hacked") is None


@needs_browser
def test_a_run_that_goes_on_is_followed(run: Path, browser: Browser, tmp_path: Path, monkeypatch):
    """A server on loopback shows what is there, and what comes later without a reload."""
    (tmp_path / "trees").mkdir()
    (tmp_path / "config.yaml").write_text((run / "config.yaml").read_text())
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_text(lines[0])
    server = uvicorn.Server(uvicorn.Config(app(tmp_path), port=0, log_level="warning", lifespan="off"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.05)
        port = server.servers[0].sockets[0].getsockname()[1]
        page = Opened(browser, f"http://127.0.0.1:{port}/", WIDE)
        assert "1 of 3" in page.text("#head")
        assert "No tree was recorded" in page.text("#tree")
        (tmp_path / "metrics.jsonl").write_text("".join(lines[:2]))
        for name in ("epoch_000001.safetensors", "epoch_000001.json"):
            (tmp_path / "trees" / name).write_bytes((run / "trees" / name).read_bytes())
        page.wait_for("document.querySelector('#head').innerText.includes('2 of 3')")
        page.page.wait_for_selector("#tree .node")
        assert "epoch 1" in page.text("#tree-prompt")
        assert page.complaints == []
        first = requests.get(f"http://127.0.0.1:{port}/data.json", timeout=10)
        same = requests.get(
            f"http://127.0.0.1:{port}/data.json", headers={"If-None-Match": first.headers["ETag"]}, timeout=10
        )
        assert (first.status_code, same.status_code) == (200, 304)
        elsewhere = requests.get(f"http://127.0.0.1:{port}/", headers={"Host": "example.org"}, timeout=10)
        assert elsewhere.status_code == 400
        # A tree goes between the moment it is listed and the moment it is looked at.
        listed = [*tmp_path.glob("*"), tmp_path / "trees" / "epoch_000009.json"]
        monkeypatch.setattr(Path, "glob", lambda *_: listed)
        monkeypatch.setattr(Path, "is_file", lambda _: True)
        gone = requests.get(f"http://127.0.0.1:{port}/data.json", timeout=10)
        assert gone.status_code == 503
        assert "epoch_000009.json" in gone.text
    finally:
        server.should_exit = True
        thread.join()


@pytest.mark.parametrize(
    ("preset", "settings"),
    [("branch", []), ("flat", []), ("tempflow", []), ("branch_mix", []), ("tree", ["sample.num_trees=2", "tree.w=4"])],
)
@needs_browser
def test_every_shape_of_plan_is_drawn(browser: Browser, tmp_path: Path, preset: str, settings: list[str]):
    """Chains, combs, forests, noise in several places, scores that are missing; no run is needed for that."""
    config = load_config(preset, settings)
    plan = plan_at(config)
    scores = torch.rand(len(plan.leaves))
    scores[0] = torch.nan
    noisy = torch.where(plan.stochastic, 1.0, torch.nan)
    TreeFile(
        epoch=0, prompt="p", plan=plan, log_density=torch.randn(plan.edges), advantage=torch.randn(plan.edges),
        kept=plan.stochastic, ratio=noisy, scores={"r": scores, "total": scores}, shown=plan.preview_nodes,
        pictures=torch.zeros(len(plan.preview_nodes), 3, 8, 8, dtype=torch.uint8), latents=torch.zeros(plan.nodes, 1),
    ).save(tmp_path / "trees" / "epoch_000000")  # fmt: skip
    save_config(config, tmp_path / "config.yaml")
    for viewport in (WIDE, NARROW):
        page = Opened(browser, write_report(tmp_path), viewport)
        assert page.complaints == []
        assert not page.overflows
        assert page.count("#tree .node") == plan.nodes
        assert page.count("#tree .edge") == plan.edges
        assert "no score" in page.page.locator("#tree .node .score").all_text_contents()


@pytest.fixture
def compared(run: Path, tmp_path: Path) -> Path:
    """What `arborl compare` leaves, of two cells and two seeds, with the pictures of a real run."""
    cells = ["tree", f"tree prompts.path='{EVIL[:40]}'"]
    rows: list[Row] = []
    for place, cell in enumerate(cells):
        curves = {
            seed: [Point(1e3 * i, i, 0.4 + 0.1 * (i + seed + place) / 3, 0.01) for i in range(4)] for seed in (0, 1)
        }
        finals = {seed: line[-1].score for seed, line in curves.items()}
        rows.append(
            Row(
                cell, "tree", [0, 1], 3, 0.4, 0.55 + place / 10, 0.01, 2e3, 300, 3e3, 3, 2**28, 0.55 + place / 10,
                0.01, 2e3, finals, curves,
            )
        )  # fmt: skip
        shutil.copytree(run / "samples", tmp_path / Cell(cell).folder / "seed-0" / "samples")
    (tmp_path / "tree" / "seed-0" / "report.html").write_text("a page")
    comparison = Comparison(Protocol((0, 1), 3e3), "own", "tree", 0.55, 3e3, rows)
    assert Comparison.from_json(comparison.as_json()) == comparison
    write(comparison, tmp_path)
    return tmp_path


@needs_browser
@pytest.mark.parametrize("viewport", [WIDE, NARROW], ids=["wide", "narrow"])
def test_a_comparison_in_the_same_style(compared: Path, browser: Browser, viewport):
    page = Opened(browser, compared / "report.html", viewport)
    assert page.complaints == []
    assert [request for request in page.requests if request[:5] != "data:"] == [(compared / "report.html").as_uri()]
    assert not page.overflows
    assert page.count("#table tbody tr") == 2
    table = page.text("#table")
    assert all(text in table for text in ("0.550 ± 0.010", "0.650 ± 0.010", EVIL[:40]))
    assert page.count("#table a") == 1, "a run's own page, where there is one"
    assert page.count("#curves svg") == 2
    assert page.count("#front svg circle") >= 8
    assert page.count("#pictures tbody tr") == 3, "before, and a row for each cell"
    assert page.count("#pictures img") == 3 * 3
    assert EVIL in page.text("#pictures thead")
    assert page.page.evaluate("window.hacked") is None


def test_the_data_is_json_and_small(run: Path):
    data = read(run)
    assert json.loads(json.dumps(data, allow_nan=False)) == json.loads(json.dumps(data))
    assert data["metrics"]["learning_rate"] == [1e-4, pytest.approx(1e-4 * 2 / 3), pytest.approx(1e-4 / 3), None]
    assert (run / "report.html").stat().st_size < 2_000_000
    assert render(data).count("<script") == 2 + len(re.findall(r"sha256-", render(data))) - 1


def test_many_recorded_epochs_are_thinned_evenly():
    items = [{"epoch": epoch, "text": "x" * 90} for epoch in range(100)]
    size = len(json.dumps(items[50]))
    few = evenly_within(items, 10 * size)
    assert [few[0]["epoch"], few[-1]["epoch"]] == [0, 99]
    assert 9 <= len(few) <= 10
    assert len(evenly_within(items, 10**9)) == 100
    assert [item["epoch"] for item in evenly_within(items, 1)] == [0, 99]
    assert evenly_within([], 5) == evenly_within(items[:0], 0) == []
    assert evenly(items[:1], 48) == items[:1]


def test_epochs_that_are_done_again_leave_nothing_behind(tmp_path: Path):
    """A run that is taken back to an earlier checkpoint shows no tree and no picture of what was undone."""
    small = ["sample.num_prompts=2", "eval.num_prompts=2", "eval.every=1", "log.record_every=1", "log.trackers=[]"]
    small += [f"log.dir={tmp_path}", "run_name=x", "log.save_every=2", "log.keep=9"]
    folder = train(load_config("mixture", ["train.epochs=4", *small]))
    shutil.rmtree(folder / "checkpoints" / "epoch_000004")
    train(load_config("mixture", ["train.epochs=3", *small]), folder)
    data = read(folder)
    assert [tree["epoch"] for tree in data["trees"]] == [0, 1, 2]
    assert [sheet["epoch"] for sheet in data["sheets"]] == [0, 1, 2, 3]
    assert data["metrics"]["epoch"] == [0, 1, 2, 3]


@needs_browser
def test_every_metric_of_a_built_in_loss_has_a_chart(run: Path, browser: Browser, tmp_path: Path):
    losses = [Surrogate(clip=0.1, kl=0.1), Dppo(), Guard(clip=0.1), Nft(), Awm(off_policy=True)]
    assert {type(loss) for loss in losses} == {*LOSSES.values()}
    names = {name for loss in losses for name in loss.metrics} - {"loss"}
    rows = [row | dict.fromkeys(names, 0.1 * row["epoch"]) for row in read_metrics(run)[:3]]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "config.yaml").write_text((run / "config.yaml").read_text())
    page = Opened(browser, write_report(tmp_path), WIDE)
    assert page.complaints == []
    assert names <= {*page.page.locator("#update figcaption .key").all_inner_texts()}
    for title in ("matching error of noised leaves", "edges left out as they go on away, share"):
        assert page.count(f'#update svg[aria-label="{title}"]') == 1


@needs_browser
@pytest.mark.parametrize(("settings", "lines", "points"), [([], 0, 2), (["eval.every=1"], 1, 4)])
def test_two_evaluations_are_points_and_more_are_a_curve(
    browser: Browser, tmp_path: Path, settings: list[str], lines: int, points: int
):
    quiet = ["train.epochs=3", "eval.every=0", "eval.num_prompts=3", "log.record_every=0", "log.trackers=[]"]
    folder = train(load_config("mixture", [*quiet, *settings, f"log.dir={tmp_path}"]))
    page = Opened(browser, folder / "report.html", WIDE)
    assert page.complaints == []
    assert page.count('#curves g[aria-label="line"][stroke="#1b6ca8"]') == lines
    assert page.count('#curves g[aria-label="dot"][fill="#1b6ca8"] circle') == points
    assert page.count('#curves g[aria-label="rule"][stroke="#1b6ca8"] line') == (0 if lines else points), "errors"
    assert page.count('#update svg[aria-label="gradient norm"]') == 1
    assert page.count('#update svg[aria-label="learning rate"]') == 0, "a constant one needs no curve"
    assert f"torch {torch.__version__}" in page.text("#environment")
    assert "CPU" in page.text("#head .facts")


@needs_browser
def test_evaluations_of_fewer_pictures_are_a_curve_and_those_of_all_are_points(browser: Browser, tmp_path: Path):
    settings = ["train.epochs=3", "eval.every=1", "eval.num_prompts=5", "eval.num_between=2", "log.record_every=0"]
    folder = train(load_config("mixture", [*settings, "log.trackers=[]", f"log.dir={tmp_path}"]))
    page = Opened(browser, folder / "report.html", WIDE)
    assert page.count('#curves g[aria-label="line"][stroke="#d1495b"]') == 1
    assert page.count('#curves g[aria-label="dot"][fill="#d1495b"] circle') == 4
    assert page.count('#curves g[aria-label="dot"][fill="#1b6ca8"] circle') == 2
    legend = page.text("#curves figcaption")
    assert "the first 2 training prompts, by ODE" in legend
    assert "all 5" in legend
    rows = read_metrics(folder)
    assert str(shown(rows[-1]["eval/place"])) in page.text("#head .headline")


@needs_browser
def test_several_rewards_are_each_shown_as_they_are(browser: Browser, tmp_path: Path):
    """A sum of z-scores is 0 whatever happens; a weight is no part of a score."""
    settings = ["+rewards.bright.fn=brightness", "+rewards.bright.weight=-2", "train.epochs=2", "sample.num_prompts=2"]
    settings += ["eval.num_prompts=3", "log.record_every=1", "log.trackers=[]", f"log.dir={tmp_path}"]
    folder = train(load_config("mixture", settings))
    page, row = Opened(browser, folder / "report.html", WIDE), read_metrics(folder)[1]
    assert page.complaints == []
    assert page.count("#curves svg[role=img]") == 2
    for name in ("place", "bright"):
        assert number(page.text(f'[data-metric="rewards/{name}/mean"]')) == pytest.approx(
            shown(row[f"rewards/{name}/mean"])
        )
    told = details(page)
    assert {"score-place", "score-bright", "score-total"} <= told.keys()


def test_signs_of_hacking_are_those_that_the_run_saw():
    """Of the epoch that an evaluation stands before nothing was known yet."""
    rows = [{"epoch": 0, "eval/p": 0.0, "eval/pictures/dark": 0.1, "diversity": 1.0}]
    rows += [{"epoch": 1, "diversity": 0.9}, {"epoch": 2, "eval/p": 2.0, "eval/pictures/dark": 0.1, "diversity": 0.05}]
    seen = _as_the_run_saw(rows)
    assert seen == [
        {"epoch": 0, "eval/p": 0.0, "eval/pictures/dark": 0.1},
        {"diversity": pytest.approx(0.95)},
        {"epoch": 2, "eval/p": 2.0, "eval/pictures/dark": 0.1},
        {"diversity": 0.05},
    ]


def test_long_runs_stay_small():
    rows = [
        {"epoch": epoch, "reward": epoch / 7, **({"eval/p": 1.0} if epoch % 100 == 0 else {})}
        for epoch in range(20_000)
    ]
    some = _some(rows, {7777})
    assert rows[7777] in some, "a tree of that epoch is shown"
    assert len(some) <= MAX_ROWS + 202
    assert [row["epoch"] for row in some if "eval/p" in row] == list(range(0, 20_000, 100))
    assert some[-1] is rows[-1]
    assert len(json.dumps(columns(some))) < 100_000


def test_what_cannot_be_shown_is_one_line(run: Path, tmp_path: Path, capsys, monkeypatch):
    def fails(*arguments: str) -> str:
        with pytest.raises(SystemExit) as end:
            main(["report", *arguments])
        assert end.value.code == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        return said

    monkeypatch.chdir(tmp_path)
    assert "there is no run in runs/ yet" in fails()
    assert "is not a run folder" in fails(str(tmp_path))
    assert "--out" in fails(str(run), "--live", "--out", "x.html")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "seen").symlink_to(run)
    with pytest.raises(SystemExit) as end:
        main(["report", "--json", "--out", str(tmp_path / "page.html")])
    assert end.value.code == 0
    assert json.loads(capsys.readouterr().out)["report"] == str(tmp_path / "page.html")
    (tmp_path / "broken" / "samples").mkdir(parents=True)
    (tmp_path / "broken" / "config.yaml").write_text((run / "config.yaml").read_text())
    for name in ("epoch_000000.png", "epoch_000000.json"):
        (tmp_path / "broken" / "samples" / name).write_text("{}")
    assert "samples/epoch_000000.json: cannot be read" in fails("broken")
    assert "cannot be written" in fails(str(run), "--out", "nowhere/page.html")
    assert "cannot be written" in fails(str(run), "--out", str(tmp_path))
    assert not [path for path in tmp_path.iterdir() if path.suffix == ".tmp"]
    assert "is not a run folder" in fails("--live", "nosuchrun")
    (tmp_path / "broken" / "trees").mkdir()
    shutil.rmtree(tmp_path / "broken" / "samples")
    for text in ("{", "[]", '{"format": "arborl.tree", "version": 3}', "\xff"):
        (tmp_path / "broken" / "trees" / "epoch_000000.json").write_bytes(text.encode("latin-1"))
        shutil.copy(run / "trees" / "epoch_000000.safetensors", tmp_path / "broken" / "trees")
        assert "trees/epoch_000000" in fails("broken")
    (tmp_path / "broken" / "metrics.jsonl").write_text("3\n")
    assert "line 1 of its metrics.jsonl is damaged" in fails("broken")
