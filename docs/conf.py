"""Configuration of the documentation: `python -m sphinx -W -b html docs docs/_build/html`."""

import sys
from importlib.resources import files
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "_ext"), str(HERE.parent / "tools")]

import numattn  # noqa: E402

project = "numattn"
author = "The numattn developers"
copyright = "The numattn developers"
version = release = numattn.__version__

extensions = [
    "docstrings",  # docs/_ext: our docstrings in the form that napoleon reads
    "generated",  # docs/_ext: pages made from the registry and the package tree
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
exclude_patterns = ["_build", "_ext", "jupyter_execute"]
default_role = "py:obj"

myst_enable_extensions = ["dollarmath", "deflist"]
myst_heading_anchors = 3
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_merge_streams = True

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
napoleon_use_ivar = True
python_maximum_signature_line_length = 88

html_theme = "furo"
html_title = f"numattn {release}"
html_show_sphinx = False
html_css_files = ["numattn.css"]
# MathJax is served from the built site: the whole renderer, with its glyphs, is this one file.
mathjax_path = "tex-svg.js"
html_static_path = ["_static", str(files("mathjax") / "static/mathjax/es5" / mathjax_path)]
