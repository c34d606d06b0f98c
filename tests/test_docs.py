"""What the README, the guides and the notebooks say is true of this version."""

import json
import re
import runpy
from pathlib import Path

import pytest

import numattn

ROOT = Path(__file__).parents[1]
GENERATED = ROOT / "docs" / "generated"
PAGES = sorted(
    [*ROOT.glob("*.md"), *(p for p in ROOT.glob("docs/**/*.md") if GENERATED not in p.parents)]
)
WRITTEN = [page for page in PAGES if "_build" not in page.parts]
NOTEBOOKS = sorted(ROOT.glob("notebooks/*.ipynb"))


def name(path):
    return path.relative_to(ROOT).as_posix()


def python_blocks(page):
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)


@pytest.mark.parametrize("page", [p for p in WRITTEN if python_blocks(p)], ids=name)
def test_python_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scope = {"__name__": "__main__"}
    for block in python_blocks(page):
        exec(compile(block, name(page), "exec"), scope)


def test_the_readme_has_ten_lines_of_use():
    blocks = python_blocks(ROOT / "README.md")
    assert blocks
    assert all(len(block.splitlines()) <= 10 for block in blocks)


def test_the_readmes_commands_are_one_line_each():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for mark in ("measure-command", "test-command"):
        (block,) = re.findall(rf"^<!-- {mark} -->\n```bash\n(.*?)^```", text, re.M | re.S)
        assert len(block.splitlines()) == 1


def test_the_readmes_table_is_current():
    tables = runpy.run_path(str(ROOT / "tools" / "tables.py"))
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert tables["updated"](text) == text, "run `python tools/tables.py --write`"


@pytest.mark.parametrize("page", WRITTEN, ids=name)
def test_relative_links_exist(page):
    text = re.sub(r"^```(?!\{).*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    links = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r"^```\{image\} (\S+)", text, re.M)
    for link in links:
        path = link.partition("#")[0]
        if re.match(r"[a-z]+:", link) or not path:
            continue
        target = (page.parent / path).resolve()
        if GENERATED not in target.parents:
            assert target.exists(), f"{name(page)} links to {link}"


def test_the_version_is_everywhere_the_same():
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(r"^version: (\S+)$", citation, re.M).group(1) == numattn.__version__
    assert re.search(r"^## (\S+)", changelog, re.M).group(1) == numattn.__version__


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=name)
def test_notebooks_are_committed_as_they_ran(notebook):
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert outputs
    assert all(output["output_type"] != "error" for output in outputs)
    assert not any(output.get("name") == "stderr" for output in outputs)
