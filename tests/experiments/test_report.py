"""The page over all runs."""

import json
import re
import shutil
import subprocess
import tempfile
from dataclasses import replace
from html import escape
from pathlib import Path

import pytest
import typer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made_runs import make_record, make_runs
from pages import Page
from PIL import Image
from typer.testing import CliRunner

from onlinenorm.experiments.experiment import Request
from onlinenorm.experiments.paper import FIGURES, REPORTED
from onlinenorm.experiments.recipes import EXPERIMENTS
from onlinenorm.experiments.report import report
from onlinenorm.experiments.report.collect import collect
from onlinenorm.experiments.report.page import _ranges
from onlinenorm.experiments.report.training import reproducibility
from onlinenorm.hyperparameters import decay_of

app = typer.Typer()
app.command()(report)


def run_report(out: Path):
    return CliRunner().invoke(app, ["--out", str(out)])


def page_over(out: Path) -> Page:
    ran = run_report(out)
    assert ran.exit_code == 0, ran.output
    assert ran.stderr == ""
    return Page(out / "report" / "index.html")


def job(name="mlp", norm="online", seed=0, scale="cpu", **changes):
    base = EXPERIMENTS[name]
    return next(base.jobs(Request(scale, (norm,), (seed,), "32", base, changes)))


# The whole page


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    """Runs of every experiment."""
    out = tmp_path_factory.mktemp("runs")
    for name in EXPERIMENTS:
        make_runs(out, name)
    make_runs(out, "cifar10", "paper", seeds=range(5))
    return out


def test_every_experiment_has_its_figures_tables_and_sources(everything):
    page = page_over(everything)
    html = (everything / "report" / "index.html").read_text()
    assert set(EXPERIMENTS) <= set(page.ids)
    assert "Not run" not in page.text
    results = re.findall(r'href="#([^"]+)">.*?<td class="words">([^<]*)', html)
    assert [name for name, _ in results] == list(EXPERIMENTS)
    for name, result in results:
        assert re.match(r"(paper|cpu): .+", result), name
    for name, section in re.findall(r'<section id="([^"]+)">(.*?)</section>', html, re.S):
        assert "<svg" in section, name
        assert "onlinenorm reproduce" in section, name
        assert "0123456789" in section, name  # the commit
        assert "A processor, 2 cores, device cpu" in section, name
        assert "No number to draw" not in section, name
        if name in FIGURES:
            assert FIGURES[name].caption in Page.text_of(section), name
        else:
            assert "The paper has no such figure" in section, name


def test_the_page_needs_nothing_else(everything):
    page = page_over(everything)
    assert all(address.startswith(("data:", "#")) for address in page.addresses)
    assert not {"script", "iframe", "object", "embed", "img"} & set(page.tags)
    assert "url(" not in (everything / "report" / "index.html").read_text()


def test_every_number_of_the_paper_stands_beside_the_measured_one(everything):
    text = page_over(everything).text
    for name in set(EXPERIMENTS) & set(REPORTED):
        for key, table in REPORTED[name].items():
            for norm in set(table) & set(EXPERIMENTS[name].norms):
                assert str(table[norm]) in text, (name, key, norm)
    assert "inside the paper's range" in text


def test_without_runs_the_page_says_how_to_get_them(tmp_path):
    text = page_over(tmp_path).text
    for name, experiment in EXPERIMENTS.items():
        assert f"onlinenorm reproduce {name}" in text
        assert experiment.time["cpu"] in text
    assert str(REPORTED["mlp"]["accuracy"]["online"]) in text


# What is compared, and what is not


def test_scales_and_changed_settings_are_kept_apart(tmp_path):
    make_runs(tmp_path, "mlp", "paper", seeds=[0])
    make_runs(tmp_path, "mlp", "cpu", seeds=[0, 1])
    make_runs(tmp_path, "mlp", "smoke", seeds=[0])
    make_runs(tmp_path, "mlp", "cpu", seeds=[0, 1, 2], learning_rate="0.1", epochs="3")
    found = [(c.scale, c.changes, len(c.finished)) for c in collect(tmp_path).comparisons["mlp"]]
    norms = len(EXPERIMENTS["mlp"].norms)
    changed = "epochs=3 and learning_rate=0.1"
    assert found == [("paper", "", norms), ("cpu", "", 2 * norms), ("cpu", changed, 3 * norms), ("smoke", "", norms)]
    assert changed in page_over(tmp_path).text


def test_experiments_over_others_are_kept_apart(tmp_path):
    for on in ("mlp", "cifar10"):
        make_runs(tmp_path, "batch-size", on=on, seeds=[0])
    assert [c.base.name for c in collect(tmp_path).comparisons["batch-size"]] == ["cifar10", "mlp"]


def test_sweeps_over_the_decays_are_maps_too(tmp_path):
    decays = [(2, 2), (2, 128), (1024, 2), (1024, 128)]
    for forward, backward in decays:
        changed = replace(job().settings, alpha_fwd=decay_of(forward), alpha_bwd=decay_of(backward))
        make_record(tmp_path, replace(job(), name="sweep-mlp", settings=changed)).write()
    make_runs(tmp_path, "decay-sweep", on="mlp", seeds=[0])
    found = collect(tmp_path).comparisons["decay-sweep"]
    assert sorted(len(comparison.finished) for comparison in found) == [4, 49]
    html = _html(tmp_path)
    assert html.count("forward horizon, samples</text>") == 2
    assert "of 4 cells" in html


def test_sweeps_over_other_settings_have_maps_of_their_own(tmp_path):
    for rate in (0.1, 0.2):
        changed = replace(job().settings, learning_rate=rate)
        make_record(tmp_path, replace(job(), name="sweep-mlp", settings=changed)).write()
    assert str(tmp_path / "sweep-mlp" / "cpu") in page_over(tmp_path).text


def test_a_run_that_is_not_finished_is_named_and_does_not_count(tmp_path):
    make_runs(tmp_path, "mlp", norms=["online"], seeds=[0])
    with_one = re.sub(r"<p>Not finished.*?</ul>", "", _html(tmp_path), flags=re.S)
    interrupted = make_record(tmp_path, job(seed=1), status="running")
    replace(interrupted, rows=interrupted.rows[:2]).write()
    html = _html(tmp_path)
    assert "online-seed1: 2 epochs done" in html
    assert "--resume" in html
    assert re.sub(r"<p>Not finished.*?</ul>", "", html, flags=re.S) == with_one


def test_only_unfinished_runs(tmp_path):
    make_record(tmp_path, job(), rows=[], status="running").write()
    assert "0 epochs done" in page_over(tmp_path).text


def _html(out: Path) -> str:
    page_over(out)
    return (out / "report" / "index.html").read_text()


def test_runs_that_diverged_count(tmp_path):
    make_runs(tmp_path, "mlp", norms=["online"], seeds=[0, 1])
    rows = [{"epoch": 1, "train_loss": None, "diverged": True, "accuracy": 10.0, "loss": None}]
    make_record(tmp_path, job(seed=2), rows=rows).write()
    text = page_over(tmp_path).text
    assert "(10.00 to" in text
    assert "to diverged, 3 runs)" in text  # the loss
    for seed in (0, 1):
        make_record(tmp_path, job(seed=seed), rows=rows).write()
    assert "diverged" in page_over(tmp_path).text


def test_reproducibility_is_drawn_from_all_seeds(tmp_path):
    make_runs(tmp_path, "mlp", seeds=range(4))
    comparison = collect(tmp_path).comparisons["mlp"][0]
    figure = reproducibility(comparison.experiment, comparison.finished)
    assert figure.count("<circle") == 4 * len(EXPERIMENTS["mlp"].norms)
    assert figure.count('class="reference"') == len(EXPERIMENTS["mlp"].norms)


# What cannot be read


def damage(record: dict, **changes) -> dict:
    return {**record, **changes}


@pytest.mark.parametrize(
    "changes",
    [
        {"format": 99},
        {"experiment": "chess"},
        {"base": "chess"},
        {"scale": "planet"},
        {"rows": "none"},
        {"rows": []},
        {"rows": [1, 2]},
        {"rows": [{"accuracy": 90.0}]},
        {"rows": [{"epoch": 1, "accuracy": "high", "loss": 1.0}]},
        {"rows": [{"epoch": 1}]},
        {"settings": []},
        {"settings": {"norm": "online"}},
        {"settings": {"norm": "magic", "seed": 0}},
        {"label": "another"},
        {"seconds": "long"},
        {"machine": None},
        {"unknown": 1},
    ],
    ids=str,
)
def test_a_damaged_record_is_named_and_left_out(tmp_path, changes):
    make_runs(tmp_path, "mlp", norms=["batch"], seeds=[0])
    before = page_over(tmp_path).text
    record = make_record(tmp_path, job())
    record.write()
    path = record.directory / "run.json"
    path.write_text(json.dumps(damage(json.loads(path.read_text()), **changes)))
    ran = run_report(tmp_path)
    assert ran.exit_code == 0, ran.output
    assert str(path) in ran.stderr
    page = Page(tmp_path / "report" / "index.html")
    assert str(path) in page.text
    assert before.split("CIFAR-10")[-1] == page.text.split("CIFAR-10")[-1]  # all below the warning


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=3,
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_whatever_a_record_has_there_is_a_page(tmp_path, data):
    name, on = data.draw(st.sampled_from([("mlp", "mlp"), ("decay-sweep", "mlp"), ("batch-size", "mlp")]))
    out = Path(tempfile.mkdtemp(dir=tmp_path))
    path = make_runs(out, name, "smoke", seeds=[0], on=on)[-1].directory / "run.json"
    record = json.loads(path.read_text())
    inside = data.draw(st.sampled_from([record, record["settings"], record["rows"][0], record["machine"]]))
    inside[data.draw(st.sampled_from(sorted(inside)))] = data.draw(ANYTHING)
    path.write_text(json.dumps(record))
    ran = run_report(out)
    assert ran.exit_code == 0, ran.output
    Page(out / "report" / "index.html")


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"jaccard": 1}', "\x00"])
def test_a_foreign_file_is_named_and_left_out(tmp_path, content):
    (tmp_path / "somewhere").mkdir()
    (tmp_path / "somewhere" / "run.json").write_text(content)
    ran = run_report(tmp_path)
    assert ran.exit_code == 0, ran.output
    assert str(tmp_path / "somewhere" / "run.json") in ran.stderr


def test_a_run_in_a_wrong_place_does_not_count_twice(tmp_path):
    record = make_runs(tmp_path, "mlp", norms=["online"], seeds=[0])[0]
    shutil.copytree(record.directory, tmp_path / "copy of a run")
    ran = run_report(tmp_path)
    assert "belongs into" in ran.stderr
    assert len(collect(tmp_path).comparisons["mlp"][0].finished) == 1


def test_nothing_in_a_record_becomes_markup(tmp_path):
    evil = '<script>alert("x")</script>&'
    record = make_record(tmp_path, job())
    record = replace(record, command=evil, commit=evil, machine={"cpu": evil})
    record.write()
    page = page_over(tmp_path)
    assert "script" not in page.tags
    assert evil in page.text


# The command


def test_no_directory(tmp_path):
    ran = run_report(tmp_path / "nowhere")
    assert ran.exit_code == 1
    assert "nowhere" in ran.stderr
    assert "--out" in ran.stderr


def test_a_page_that_cannot_be_written_leaves_the_old_one(tmp_path):
    page_over(tmp_path)
    before = (tmp_path / "report" / "index.html").read_bytes()
    (tmp_path / "report" / "index.html.part").mkdir()
    ran = run_report(tmp_path)
    assert ran.exit_code == 1
    assert "Cannot write" in ran.stderr
    assert (tmp_path / "report" / "index.html").read_bytes() == before


def test_seeds_in_words():
    assert _ranges([0, 1, 2, 3, 7, 9, 10]) == "0 to 3, 7, 9 to 10"


# In a browser


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
QUIET = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--hide-scrollbars", "--enable-logging=stderr",
]  # fmt: skip
# A window has a least width, a frame in it has none.
FRAME = """<!doctype html><title></title><body style="margin: 0">
<iframe style="border: 0; width: {width}px; height: 3000px" srcdoc="{page}"></iframe>
<script>onload = () => document.title = frames[0].document.documentElement.scrollWidth</script>"""


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
@pytest.mark.parametrize("width", [1200, 390])
@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_in_a_browser(everything, tmp_path, width, scheme):
    """Nothing sticks out at the side, nothing is complained about, and dark is dark."""
    page_over(everything)
    html = (everything / "report" / "index.html").read_text().replace("<details>", "<details open>")
    framed = tmp_path / "framed.html"
    framed.write_text(FRAME.format(width=width, page=escape(html)))

    def browse(*options: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [
                CHROMIUM, *QUIET, f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},3000",
                f"--blink-settings=preferredColorScheme={int(scheme == 'light')}", *options, f"file://{framed}",
            ],
            capture_output=True, text=True, timeout=120, check=True,
        )  # fmt: skip

    dumped = browse("--dump-dom")
    assert int(re.search(r"<title>(\d+)</title>", dumped.stdout)[1]) == width
    assert "CONSOLE" not in dumped.stderr
    browse(f"--screenshot={tmp_path / 'page.png'}")
    picture = Image.open(tmp_path / "page.png").convert("L")
    darkest, lightest = picture.getextrema()
    assert lightest - darkest > 150  # text can be told from paper
    assert (picture.getpixel((2, 2)) < 100) == (scheme == "dark")
