"""The report in a real browser: no error, nothing fetched, plots drawn, strings of users stay text."""

import json

import pytest

from siamesenorm.lab import inspect
from siamesenorm.lab.inspection.figures import plots
from siamesenorm.lab.inspection.page import write_report as write_inspection
from siamesenorm.lab.report.outcome import Comparison
from siamesenorm.lab.report.records import find_runs, read_records
from siamesenorm.lab.report.statistics import analyse

from .browser import Browser
from .folders import FACTS, write_grid
from .stacks import ids, tiny_lm

EVIL = "<script>window.hacked=1</script><img src=x onerror='window.hacked=2'>"
SCORES = {
    ("pre", 1e-3): [2.50, 2.52, 2.48],
    ("pre", 1e-2): [2.10, 2.12, 2.09],
    ("siamese:depth_scaling=none,input_norm=false", 1e-3): [2.40, 2.42, 2.39],
    ("siamese:depth_scaling=none,input_norm=false", 1e-2): [2.00, 2.03, 1.98],
    ("post", 1e-3): [2.30, 2.33, 2.29],
    ("post", 1e-2): [None, 2.9, None],
}
PLOTS = ["curves", "cost", "differences", "heat-map", "learning-rate"]


@pytest.fixture(scope="module")
def browser():
    opened = Browser()
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """A grid whose names, messages, commands and corpora are full of markup."""
    root = tmp_path_factory.mktemp("report")
    for number, folder in enumerate(write_grid(root / "cells", SCORES)):
        status = json.loads((folder / "status.json").read_text())
        (folder / "status.json").write_text(json.dumps({**status, "message": EVIL}))
        (folder / "cell.json").write_text(json.dumps({**FACTS, "command": EVIL, "data": {EVIL: "ab"}}))
        folder.rename(folder.with_name(f"<img src=x onerror='window.hacked=3'>{number}"))
    records = read_records(find_runs([root]))
    return Comparison(records, analyse(records, baseline="pre"), root, title=f"Report {EVIL}").write()


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1200, 390], ids=["desk", "phone"])
def test_it_opens_without_an_error_and_without_a_request(browser, report, width, dark):
    browser.open(report, width=width, dark=dark)
    assert browser.problems == []
    assert browser.requests == [report.resolve().as_uri()]
    back = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert back == ("rgb(20, 23, 27)" if dark else "rgb(255, 255, 255)")
    # Nothing but tables and listings, which scroll by themselves, is wider than the screen.
    assert browser.evaluate("document.documentElement.scrollWidth") <= width


def test_every_plot_is_drawn_with_its_lines(browser, report):
    browser.open(report)
    assert sorted(browser.evaluate("[...document.querySelectorAll('.plot')].map(p => p.id.slice(5))")) == sorted(PLOTS)
    for name in PLOTS:
        box = f"{svg(name)}.getBoundingClientRect()"
        width, height = browser.evaluate(f"[{box}.width, {box}.height]")
        assert width > 400
        assert height > 150
    assert browser.evaluate(f"{plot('curves')}.querySelectorAll('.scatterlayer .trace').length") >= 6
    assert browser.evaluate(f"{plot('cost')}.querySelectorAll('.bars .point').length") >= 6
    assert browser.evaluate(f"{plot('heat-map')}.querySelectorAll('.hm image').length") == 1
    assert "diverged" in browser.evaluate(f"{plot('learning-rate')}.textContent")


def test_a_cell_without_a_number_says_so_in_its_own_place(tmp_path, browser):
    folders = write_grid(tmp_path / "cells", {("pre", 1e-3): [2.5, 2.4], ("pre", 1e-2): [None, None]})
    records = read_records(folders)
    browser.open(Comparison(records, analyse(records, baseline="pre"), tmp_path, title="Two cells").write())
    notes = f"[...{plot('heat-map')}.querySelectorAll('.annotation-text-g')]"
    text = f"{notes}.find(note => note.textContent.includes('diverged')).getBoundingClientRect()"
    cells = f"{plot('heat-map')}.querySelector('.hm image').getBoundingClientRect()"
    where = browser.evaluate(f"({text}.left + {text}.width / 2 - {cells}.left) / {cells}.width")
    assert 0.6 < where < 0.9  # the middle of the second of two columns
    assert browser.evaluate(f"{plot('heat-map')}.textContent").count("diverged") == 1


def test_the_grid_is_readable_on_a_phone(browser, report):
    """Without the bar of colours, which its numbers make superfluous, and no text over another."""
    browser.open(report, width=390)
    assert browser.evaluate(f"{plot('heat-map')}.querySelectorAll('.colorbar').length") == 0
    names = f"[...{plot('heat-map')}.querySelectorAll('.heatmap-label, .annotation-text')]"
    boxes = browser.evaluate(
        f"{names}.map(n => n.getBoundingClientRect()).map(b => [b.left, b.top, b.right, b.bottom])"
    )
    assert boxes
    for number, (left, top, right, bottom) in enumerate(boxes):
        for other in boxes[:number]:
            assert right <= other[0] or other[2] <= left or bottom <= other[1] or other[3] <= top
    browser.open(report)
    assert browser.evaluate(f"{plot('heat-map')}.querySelectorAll('.colorbar').length") == 1


def test_a_table_that_scrolls_shows_where_more_of_it_is(browser, report):
    """Shades lie at both sides, each covered where the table ends; keys scroll it too."""
    browser.open(report, width=390)
    wider = "[...document.querySelectorAll('.wide')].filter(t => t.scrollWidth > t.clientWidth)"
    assert browser.evaluate(f"{wider}.length") > 0
    styles = browser.evaluate(f"{wider}.map(t => getComputedStyle(t).backgroundAttachment)")
    assert set(styles) == {"local, local, scroll, scroll"}
    assert set(browser.evaluate(f"{wider}.map(t => t.tabIndex)")) == {0}


def test_strings_of_users_stay_text(browser, report):
    browser.open(report)
    assert browser.evaluate("window.hacked") is None
    assert browser.evaluate("document.querySelectorAll('main img, main script').length") == 0
    assert EVIL in browser.evaluate("document.querySelector('h1').textContent")
    assert EVIL in browser.evaluate("document.title")
    assert "<img src=x onerror='window.hacked=3'>0" in browser.evaluate("document.body.textContent")


def test_a_script_that_slipped_in_would_not_run(browser, report):
    browser.open(report)
    browser.evaluate(
        "(() => { const s = document.createElement('script'); s.textContent = 'window.hacked = 4';"
        "document.body.append(s); })()"
    )
    assert browser.evaluate("window.hacked") is None


def test_the_button_changes_the_theme_of_page_and_plots(browser, report):
    def colours():
        page = browser.evaluate("getComputedStyle(document.body).color")
        return page, browser.evaluate(f"{plot('curves')}.querySelector('.xtick text').style.fill")

    browser.open(report)
    before = colours()
    for _ in range(2):  # auto, light, dark
        browser.evaluate("document.getElementById('theme').click()")
    assert browser.evaluate("document.documentElement.dataset.theme") == "dark"
    after = colours()
    assert before[0] != after[0]
    assert before[1] != after[1]
    browser.evaluate("document.getElementById('theme').click()")


def test_the_answer_stands_on_top_with_a_card_for_every_topology(browser, report):
    browser.open(report)
    cards = browser.evaluate("[...document.querySelectorAll('.card')].map(card => card.innerText)")
    assert [card.split()[0] for card in cards] == ["pre", "siamese:depth_scaling=none,input_norm=false", "post"]
    assert [card.split()[1] for card in cards] == ["2.103", "2.003", "2.307"]
    assert "0.100 better than pre" in cards[1]
    assert "stable at 1 of 2 learning rates" in cards[2]


def test_tools_of_a_plot_come_by_hovering(browser, report):
    browser.open(report)
    bar = f"getComputedStyle({plot('curves')}.querySelector('.modebar')).opacity"
    assert browser.evaluate(bar) == "0"


def test_a_name_in_the_legend_can_be_hidden(browser, report):
    browser.open(report)
    hidden = "document.getElementById('plot-learning-rate').data.filter(t => t.visible === 'legendonly').length"
    assert browser.evaluate(hidden) == 0
    browser.evaluate("Plotly.restyle('plot-learning-rate', {visible: 'legendonly'}, [0]).then(() => null)")
    assert browser.evaluate(hidden) == 1


@pytest.mark.parametrize("width", [1200, 390], ids=["desk", "phone"])
def test_an_inspection_opens_with_all_its_plots_and_its_strings_stay_text(browser, tmp_path, width):
    found = inspect(tiny_lm("siamese", blocks=2), {"input_ids": ids(), "labels": ids()})
    found = found.model_copy(update={"source": {"folder": EVIL, "text": EVIL, "command": EVIL}})
    _, page = write_inspection(found, tmp_path)
    browser.open(page, width=width)
    assert browser.problems == []
    assert browser.requests == [page.resolve().as_uri()]
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    for name in (drawn.name for drawn in plots(found)):
        assert browser.evaluate(f"{svg(name)}.querySelectorAll('.trace, .hm image').length") >= 1, name
    assert browser.evaluate("window.hacked") is None
    assert EVIL.rpartition("/")[2] in browser.evaluate("document.querySelector('h1').textContent")
    tops = browser.evaluate("[...document.querySelectorAll('.half')].map(half => half.getBoundingClientRect().top)")
    assert len(tops) == 2
    assert (tops[0] == tops[1]) == (width == 1200)  # the two streams' similarities stand side by side


def plot(name: str) -> str:
    return f"document.getElementById('plot-{name}')"


def svg(name: str) -> str:
    return f"{plot(name)}.querySelector('svg.main-svg')"
