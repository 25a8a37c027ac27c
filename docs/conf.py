"""Settings of the site, for Sphinx; ``docs/build_site.py`` (``make site``) brings its pages together and builds it."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

import perfed

sys.path.insert(0, str(Path(__file__).parent))
import glossary_links

# Load pydantic's models here: autodoc sets TYPE_CHECKING, with which they cannot be built.
for _name in perfed.__all__:
    getattr(perfed, _name)

_project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]

project = "perfed"
author = "the authors of perfed"
version = release = _project["version"]
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
]

# Links to headings are those that forges make; the build fails where one has no heading.
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence", "deflist", "html_image"]
suppress_warnings = ["toc.empty_glob"]  # a folder of pages may be empty
highlight_language = "none"
smartquotes = False  # they print --event as a dash, and commands are copied from pages

# Docstrings also refer to what is not public: its name is shown. What is public is on the page on Python.
nitpicky = True
nitpick_ignore_regex = [("py:.*", rf"(?!perfed\.({'|'.join(perfed.__all__)})$).*")]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_class_signature = "separated"
napoleon_numpy_docstring = False

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["terms.css"]
html_title = f"perfed {version}"
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}
copybutton_exclude = ".linenos, .gp, .go"


def _public(app: Sphinx, env: Any, node: Any, content: nodes.Element) -> nodes.Element | None:
    """Lead a reference to ``perfed.room.module.Name`` to ``perfed.Name``, where the public interface has it."""
    name = str(node.get("reftarget", "")).rpartition(".")[2]
    if node.get("refdomain") != "py" or name not in perfed.__all__ or node["reftarget"] == f"perfed.{name}":
        return None
    domain = env.get_domain("py")
    found: nodes.Element | None = domain.resolve_xref(
        env, node["refdoc"], app.builder, "obj", f"perfed.{name}", node, content
    )
    return found


def setup(app: Sphinx) -> None:
    """Sphinx calls this."""
    app.connect("missing-reference", _public)
    app.connect("doctree-resolved", glossary_links.link)
