import json
import os
import select
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from samples import ROW

from numattn.measure import page, pictures, report

pytest.importorskip("plotly", reason="the page needs plotly")

BASE = replace(
    ROW,
    method="exact",
    family="exact",
    options={},
    budget=None,
    budget_option=None,
    units=None,
    tag="causal, diffuse",
    heads=2,
    output=None,
)
INPUTS = [
    {"input": "first"},
    {"input": "second", "tag": "causal, sink"},
    {"input": "third", "tag": "bidirectional", "is_causal": False},
]
METHODS = [
    {"method": "exact", "family": "exact"},
    {"method": "window", "family": "sparse"},
    {"method": "topk", "family": "sparse", "is_oracle": True},
    {"method": "nystrom", "family": "lowrank", "fitted": True},
    {"method": "performer", "family": "kernel", "random": True},
    {"method": "linear", "family": "kernel", "approximates": "own"},
]
MEASURED = {
    "error": "output",
    "TV": "tv_median",
    "TV95": "tv_p95",
    "eff.": "efficiency",
    "over.": "overhead",
    "b.eff.": "block_efficiency",
    "FLOPs": "relative_flops",
    "time": "time_ratio",
}


def drawn_picture(rng):
    return pictures.picture(torch.from_numpy(rng.uniform(0, 0.1, (32, 32))), 64)


def measured(rng, row):
    """The row with numbers of at most six digits, which the page keeps exactly."""
    drawn = rng.uniform(0.01, 1, len(MEASURED)).round(4).tolist()
    x = dict(zip(MEASURED.values(), drawn, strict=True))
    x.pop("relative_flops")
    if row.is_oracle:  # better and cheaper than all: it would be on every front
        for name in ("output", "time_ratio"):
            x[name] = round(x[name] / 1000, 7)
    baselines = rng.uniform(0.5, 1, 2).round(4).tolist()
    cost = {"flops": int(rng.integers(1, 100)), "exact_flops": 100}
    if row.mode == "decode":
        x.pop("time_ratio")
        cost = {"bytes_read": int(rng.integers(1, 100)), "exact_bytes_read": 100}
    return replace(
        row,
        **{**x, **cost},
        floor=1e-7,
        mean_baseline=baselines[0],
        uniform_baseline=baselines[1],
        picture="" if row.mode == "decode" else drawn_picture(rng),
    )


def made(inputs=INPUTS, methods=METHODS, budgets=(4, 16), modes=("prefill", "decode"), heads=2):
    rng = np.random.default_rng(0)
    return [
        measured(rng, replace(BASE, **where, **what, **budgeted, mode=mode, head=head, seed=seed))
        for where in inputs
        for what in methods
        for budgeted in (
            [{}]
            if what["family"] == "exact"
            else [
                {"budget": b, "budget_option": "b", "options": {"b": b}, "units": b}
                for b in budgets
            ]
        )
        for mode in modes
        for head in range(heads)
        for seed in range(2 if what.get("random") else 1)
    ]


ROWS = [
    *made(),
    replace(BASE, method="hyper", family="sparse", status="unsupported", reason="no <such> mask"),
]


class Page(HTMLParser):
    """The open tags, which must be closed in turn, the resources, and the data."""

    VOID = ("meta", "link", "br", "input")

    def __init__(self, text):
        super().__init__()
        self.open, self.resources, self.data, self.tags = [], [], "", []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.resources += [x for name, x in attributes if name in ("src", "href", "srcset", "data")]
        if tag not in self.VOID:
            self.open.append((tag, dict(attributes).get("id")))

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == ("script", "data"):
            self.data += data


def written(rows, folder):
    return page.write(rows, folder / "report.html").read_text(encoding="utf-8")


def test_it_is_one_well_formed_file_that_loads_nothing(tmp_path):
    read = Page(written(ROWS, tmp_path))
    assert all(link.startswith("#") or link == "data:," for link in read.resources)
    css = (Path(page.__file__).parent / "assets" / "page.css").read_text(encoding="utf-8")
    assert "url(" not in css
    assert "@import" not in css


def test_its_data_hold_every_number_of_the_rows(tmp_path):
    data = json.loads(Page(written(ROWS, tmp_path)).data)
    rows, places = data["rows"], data["places"]
    parts = {}
    for i, (group, place) in enumerate(zip(rows["group"], rows["place"], strict=True)):
        g, p = data["groups"][group], places[place]
        key = (g["method"], g["budget"], p["mode"], p["input"], rows["head"][i])
        parts.setdefault(key, []).append(i)
    good = [row for row in ROWS if row.status == "ok"]
    seen = {}
    for row in good:
        key = (row.method, row.budget, row.mode, row.input, row.head)
        i = parts[key][seen.setdefault(key, 0)]
        seen[key] += 1
        for name in [*MEASURED.values(), "floor", "mean_baseline", "uniform_baseline", "units"]:
            assert (rows[name][i] if rows[name] else None) == getattr(row, name)
        assert rows["relative_bytes"][i] == row.relative_bytes
    assert sum(map(len, parts.values())) == sum(seen.values()) == len(good)


@pytest.mark.parametrize(
    ("x", "kept"), [(1 / 3, 0.333333), (5, 5), (2.0, 2), (float("inf"), "Infinity"), (None, None)]
)
def test_numbers_are_kept_to_six_digits(x, kept):
    rows = [replace(BASE, output=x, mean_baseline=1.0)]
    column = page.compact(rows)["rows"]["output"]
    assert (column[0] if column else None) == kept


def test_pictures_are_kept_once_for_all_seeds():
    random = [row for row in ROWS if row.method == "performer" and row.mode == "prefill"]
    data = page.compact(random)
    assert len(random) == 2 * len(data["pictures"])
    first = {row.picture for row in random if row.seed == 0}
    assert {picture for *_, picture in data["pictures"]} == first


def test_variants_of_a_method_are_told_apart_by_what_differs():
    row = next(row for row in ROWS if row.method == "window")
    variants = [replace(row, options={**row.options, "sinks": n, "wide": True}) for n in (1, 2)]
    labels = {group["label"] for group in page.compact(variants)["groups"]}
    assert labels == {"window sinks=1", "window sinks=2"}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "There are no rows."),
        ([replace(BASE, status="failed", reason="no memory")], "Nothing was measured"),
    ],
)
def test_it_says_so_where_nothing_was_measured(tmp_path, rows, message):
    text = written(rows, tmp_path)
    assert message in text
    assert json.loads(Page(text).data)["rows"]["output"] is None


def test_the_same_rows_give_the_same_page(tmp_path):
    (tmp_path / "a").mkdir()
    assert written(ROWS, tmp_path) == written(list(ROWS), tmp_path / "a")


def test_texts_of_the_rows_are_no_markup(tmp_path):
    name = "</script><img src=x onerror=alert(1)>$js"
    rows = [replace(row, input=name, tag=name, machine=name) for row in ROWS]
    read = Page(written(rows, tmp_path))
    assert "img" not in read.tags
    assert json.loads(read.data)["places"][0]["input"] == name


def test_an_interrupted_write_leaves_the_page_that_was_there(tmp_path, monkeypatch):
    old = written(ROWS[:3], tmp_path)

    def fail(*_):
        raise OSError("the disk is gone")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="the disk is gone"):
        written(ROWS, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == old


def test_without_plotly_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(ImportError, match=r"numattn\[report\]"):
        page.write(ROWS, tmp_path / "report.html")


def test_a_large_measurement_stays_under_15_megabytes(tmp_path):
    # Pictures of random tiles do not compress: no real ones take more.
    inputs = [{"input": f"input-{i}"} for i in range(12)]
    methods = [{"method": f"m{i}", "family": "sparse", "random": i % 2 == 0} for i in range(30)]
    rows = made(inputs, methods, (16, 64, 256, 1024), ("prefill",), heads=3)
    path = page.write(rows, tmp_path / "report.html")
    assert path.stat().st_size < 15e6


# --- in a browser ---------------------------------------------------------------------------

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))),
    None,
)
needs_chromium = pytest.mark.skipif(not CHROMIUM, reason="no Chromium is installed")


class Browser:
    """A headless Chromium with one tab, by the DevTools protocol over a pipe."""

    def __init__(self, folder):
        (there, self.to), (self.back, here) = os.pipe(), os.pipe()
        flags = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--remote-debugging-pipe",
            f"--user-data-dir={folder / 'profile'}",
        ]
        self.process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{there} 4>&{here}', "bash", CHROMIUM, *flags],
            pass_fds=(there, here),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(there)
        os.close(here)
        self.read, self.count, self.events, self.session = b"", 0, [], None
        self.fresh = None  # the page and its width, while no filter was touched
        self.saved = folder / "saved"
        self.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(self.saved))
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def close(self):
        self.process.terminate()
        self.process.wait(20)
        os.close(self.to)
        os.close(self.back)

    def message(self, seconds=60):
        """The next message."""
        while b"\0" not in self.read:
            if not select.select([self.back], [], [], seconds)[0]:
                raise TimeoutError("Chromium does not answer")
            data = os.read(self.back, 1 << 16)
            if not data:
                raise EOFError("Chromium ended")
            self.read += data
        text, _, self.read = self.read.partition(b"\0")
        return json.loads(text)

    def call(self, method, **params):
        self.count += 1
        request = {"id": self.count, "method": method, "params": params}
        if self.session:
            request["sessionId"] = self.session
        os.write(self.to, json.dumps(request).encode() + b"\0")
        while True:
            answer = self.message()
            if answer.get("id") == self.count:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def open(self, path, width, height=900):
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        self.call("Page.navigate", url=path.as_uri())
        self.wait("window.numattn && document.readyState === 'complete'")
        self.fresh = (path, width)

    def run(self, script):
        """The value of an expression of JavaScript, awaited."""
        answer = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, condition, seconds=30):
        end = time.monotonic() + seconds
        while not self.run(f"!!({condition})"):
            assert time.monotonic() < end, f"never true: {condition}"
            time.sleep(0.05)

    def complaints(self):
        """What the page and the browser complained of since it was opened."""
        found = []
        for event in self.events:
            kind, params = event.get("method"), event.get("params", {})
            if kind == "Runtime.exceptionThrown":
                found.append(params["exceptionDetails"])
            elif kind == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
                found.append(params["args"])
            elif kind == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                found.append(params["entry"])
        return found


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    chromium = Browser(tmp_path_factory.mktemp("browser"))
    yield chromium
    chromium.close()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """The page of ROWS."""
    return page.write(ROWS, tmp_path_factory.mktemp("page") / "report.html")


@pytest.fixture
def opened(browser, path):
    """The page of ROWS with all filters as they are at first."""
    if browser.fresh != (path, 1280):
        browser.events.clear()
        browser.open(path, 1280)
    return browser


def check(browser, panel, text, on):
    """Set a box of a filter by a click on it."""
    browser.fresh = None
    browser.run(
        f"""(() => {{
          const boxes = [...document.querySelectorAll("[role=group][aria-label={panel!r}] label")];
          const box = boxes.find((x) => x.textContent.trim() === {text!r}).firstChild;
          if (box.checked !== {json.dumps(on)}) box.click();
        }})()"""
    )


def expected(rows):
    """Of each method, budget and mode, what `report.middle` says."""
    lines = {}
    for mode in ("prefill", "decode"):
        for part in report.by_method([r for r in rows if r.status == "ok" and r.mode == mode]):
            values = {
                name: report.middle(part, lambda r, field=field: getattr(r, field))
                for name, field in MEASURED.items()
            }
            values["worst"] = max(row.output for row in part)
            values["bytes"] = report.middle(part, lambda r: r.relative_bytes)
            values["inputs"] = len({row.setting for row in part})
            lines[part[0].method, part[0].budget, mode] = values
    return lines


def shown(browser):
    lines = browser.run("numattn.lines()")
    return {
        (line["method"], line["budget"], line["mode"]): {
            name: line[name] for name in [*MEASURED, "worst", "bytes", "inputs"]
        }
        for line in lines
    }


@needs_chromium
def test_it_opens_from_the_disk_without_complaint(opened):
    opened.wait("document.querySelectorAll('.matrices canvas').length")
    assert opened.complaints() == []
    assert opened.run("[...document.querySelectorAll('.plot .main-svg')].length") > 0


@needs_chromium
def test_no_button_sends_anything_away(opened):
    titles = opened.run(
        "[...document.querySelectorAll('.modebar-btn')].map((b) => b.dataset.title)"
    )
    assert set(titles) == {"Download plot as a PNG", "Zoom", "Pan", "Reset axes"}


@needs_chromium
def test_the_browser_aggregates_as_the_report_does(opened):
    assert shown(opened) == expected(ROWS)
    check(opened, "Causal", "causal", False)
    assert shown(opened) == expected([row for row in ROWS if not row.is_causal])


@needs_chromium
def test_baselines_are_those_of_the_report(opened):
    check(opened, "Modes", "decode", False)
    good = [row for row in ROWS if row.status == "ok" and row.mode == "prefill"]
    table = opened.run("numattn.baselines().body")
    mean = report.middle(good, lambda r: r.mean_baseline)
    assert table[0] == [
        "mean of values", "", "", mean, max(row.mean_baseline for row in good)
    ]  # fmt: skip
    assert [line[2] for line in table[1:-1]] == report.blind_units(good)
    for *_, units, error, _ in table[1:-1]:
        part = [row for row in good if row.units == units]
        assert error == report.middle(part, lambda r: r.uniform_baseline)


@needs_chromium
def test_medians_of_nothing_nan_and_infinity_are_numpys(browser, tmp_path):
    row = next(row for row in ROWS if row.method == "window" and row.mode == "prefill")
    errors = {"a": [0.1, float("inf")], "b": [0.2, 0.4], "c": [None, 0.3]}
    rows = [
        replace(row, input=name, head=head, output=x, efficiency=None)
        for name, part in errors.items()
        for head, x in enumerate(part)
    ]
    browser.open(page.write(rows, tmp_path / "report.html"), 1280)
    (line,) = browser.run(
        "numattn.lines().map((x) => [x.error, x.worst, x['eff.']]"
        ".map((x) => x === null ? null : String(x)))"
    )
    middle = report.middle(rows, lambda r: r.output)
    assert line == [str(middle), "Infinity", None]
    heads = [replace(row, head=i, output=x) for i, x in enumerate([float("nan"), 0.1, 0.3])]
    browser.open(page.write(heads, tmp_path / "nan.html"), 1280)
    assert browser.run("String(numattn.lines()[0].error)") == "NaN"


@needs_chromium
def test_numbers_read_as_in_the_report(opened):
    numbers = [0.0, 1.0, 0.1234, 12.34, 123.4, 9999.0, 1.234e-3, 9.9e-4, 12345.0, 3e-12, -0.5, 2e15]
    assert opened.run(f"{json.dumps(numbers)}.map(numattn.number)") == [
        report.number(x) for x in numbers
    ]


@needs_chromium
def test_filters_change_figures_and_tables(opened):
    drawn = "document.querySelector('#error-flops .plot').data.slice(1).map((t) => t.name)"
    assert "nystrom (f)" in opened.run(drawn)
    check(opened, "Pillars", "lowrank", False)
    assert set(opened.run(drawn)) == {"window", "topk (o)", "performer", "linear (t)"}
    assert "No rows" in opened.run("document.querySelector('#lowrank table').textContent")
    assert "Nothing to draw" in opened.run("document.querySelector('#lowrank-front').textContent")
    assert opened.run("document.querySelectorAll('#sparse tbody tr').length") == 2 * 2 * 2
    check(opened, "Modes", "decode", False)
    assert opened.run("document.querySelectorAll('#sparse tbody tr').length") == 2 * 2
    check(opened, "Pillars", "lowrank", True)
    assert "nystrom (f)" in opened.run(drawn)
    assert opened.complaints() == []


@needs_chromium
def test_the_front_is_what_nothing_dominates(opened):
    front = opened.run(
        "(() => { const [t] = document.querySelector('#error-time .plot').data;"
        "return t.x.map((x, i) => [x, t.y[i]]); })()"
    )
    lines = expected(ROWS)
    oracles = {row.method for row in ROWS if row.is_oracle}
    points = [
        (values["time"], values["error"])
        for (method, _, mode), values in lines.items()
        if mode == "prefill" and method != "exact" and method not in oracles
    ]
    undominated = [
        p for p in points if not any(q != p and q[0] <= p[0] and q[1] <= p[1] for q in points)
    ]
    assert sorted(map(tuple, front)) == sorted(undominated)


@needs_chromium
def test_a_click_saves_the_data_shown(opened):
    check(opened, "Pillars", "kernel", False)
    opened.run("document.querySelector('#error-flops .actions button').click()")
    saved = opened.saved / "error-flops.csv"
    end = time.monotonic() + 20
    while not saved.exists():
        assert time.monotonic() < end, "nothing was saved"
        time.sleep(0.05)
    text = saved.read_text(encoding="utf-8")
    assert text == opened.run("numattn.csv('error-flops')")
    assert "window" in text
    assert "performer" not in text


@needs_chromium
def test_every_figure_and_table_has_its_data(opened):
    opened.wait("document.querySelectorAll('.matrices canvas').length")
    names = opened.run(
        "[...document.querySelectorAll('.actions button[aria-label]')]"
        ".map((b) => b.getAttribute('aria-label').split(': ')[1])"
    )
    figures = opened.run("[...document.querySelectorAll('main figure[id]')].map((f) => f.id)")
    assert set(figures) < set(names)
    for name in names:
        header, *body = opened.run(f"numattn.csv({name!r})").splitlines()
        assert len(header.split(",")) > 2
        assert body


@needs_chromium
def test_the_explorer_shows_the_pictures_of_the_rows(opened):
    opened.wait("document.querySelectorAll('.matrices canvas').length")
    opened.run(
        """(() => {
          const input = document.getElementById("at-input");
          input.value = [...input.options].find((o) => o.textContent === "second").value;
          input.onchange();
          document.getElementById("at-head").value = "1";
          document.getElementById("at-head").onchange();
          const slider = document.getElementById("at-budget");
          slider.value = slider.max;
          slider.oninput();
        })()"""
    )
    opened.wait("numattn.csv('heads').includes('second,1,window,16')")
    lines = [line.split(",") for line in opened.run("numattn.csv('heads')").splitlines()[1:]]
    for method, budget in (("exact", None), ("window", 16), ("nystrom", 16)):
        row = next(
            row
            for row in ROWS
            if (row.method, row.budget, row.input, row.head, row.mode, row.seed)
            == (method, budget, "second", 1, "prefill", 0)
        )
        label = report.label([row])
        part = [line for line in lines if line[2] == label]
        assert {line[4] for line in part} == {str(row.output)}
        got = [10 ** float(line[-1]) if line[-1] else 0.0 for line in part]
        np.testing.assert_allclose(got, pictures.matrix(row.picture).ravel(), rtol=1e-9)


@needs_chromium
@pytest.mark.parametrize("width", [400, 1280])
def test_the_page_never_scrolls_sideways(browser, path, width):
    browser.events.clear()
    browser.open(path, width)
    browser.wait("document.querySelectorAll('.matrices canvas').length")
    assert browser.run("document.documentElement.scrollWidth") <= width
    assert browser.complaints() == []


@needs_chromium
@pytest.mark.parametrize("rows", [[], [replace(BASE, status="failed", reason="no memory")]])
def test_a_page_of_nothing_opens_too(browser, tmp_path, rows):
    browser.events.clear()
    browser.open(page.write(rows, tmp_path / "report.html"), 400)
    assert browser.complaints() == []
    assert ("no memory" in browser.run("document.querySelector('main').innerText")) == bool(rows)
