"""The site: ``python docs/build_site.py`` (``make site``) builds it strictly into ``build/site``.

The pages in ``docs/``, those at the root of the repository and those that are made from the code are brought together
in ``build/site-source``; Sphinx makes the site of them. A warning, also of a link without its page or heading, is a
failure.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import method_pages
import reference_pages

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
ROOT_PAGES = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md", "SECURITY.md": "security.md"}
"""Pages at the root of the repository, and where they are in the site."""
_OF_README = {"#install": "install.md", "#when-does-it-pay": "when.md"}
"""Pages that say what headings of the README say or said."""
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]*)(#[^)\s]*)?\)")


def sources(folder: Path) -> None:
    """Write everything that the site is made of into ``folder``, which is emptied."""
    shutil.rmtree(folder, ignore_errors=True)
    for file in sorted(DOCS.rglob("*")):
        at = file.relative_to(DOCS)
        if file.suffix in (".png", ".svg"):
            (folder / at).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, folder / at)
        elif file.suffix == ".md":
            _write(folder / at, moved(file.read_text(), file, at))
    for name, to in ROOT_PAGES.items():
        _write(folder / to, moved((ROOT / name).read_text(), ROOT / name, Path(to)))
    for to, text in {**method_pages.pages(), **reference_pages.pages()}.items():
        _write(folder / to, text)


def moved(text: str, file: Path, to: Path) -> str:
    """The text of ``file`` as a page at ``to``: its links lead to where pages are in the site.

    What is linked to outside the documentation, such as a source file, is its name alone.
    """

    def link(found: re.Match[str]) -> str:
        mark, words, target, heading = found[1], found[2], found[3], found[4] or ""
        if not target or re.match(r"\w+:", target):
            return found[0]
        meant = Path(os.path.normpath(file.parent / target))
        if meant.is_relative_to(DOCS):
            page = meant.relative_to(DOCS).as_posix()
        elif (name := meant.relative_to(ROOT).as_posix()) in ROOT_PAGES:
            page = ROOT_PAGES[name]
        elif name == "README.md":
            page, heading = _OF_README.get(heading, "index.md"), ""
        else:
            return words
        return f"{mark}[{words}]({os.path.relpath(page, to.parent)}{heading})"

    return _LINK.sub(link, text)


def build(folder: Path, site: Path) -> int:
    """Build the site of what is in ``folder``; the exit code of Sphinx."""
    shutil.rmtree(site, ignore_errors=True)
    command = [sys.executable, "-m", "sphinx", "-q", "-b", "html", "-W", "--keep-going", "-n", "-j", "auto"]
    doctrees = folder.with_name("doctrees")
    shutil.rmtree(doctrees, ignore_errors=True)
    return subprocess.call([*command, "-c", str(DOCS), "-d", str(doctrees), str(folder), str(site)])


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def main() -> None:
    """Bring the pages together and build; ends with Sphinx's exit code."""
    folder, site = ROOT / "build" / "site-source", ROOT / "build" / "site"
    sources(folder)
    code = build(folder, site)
    if code == 0:
        print(f"the site: {site / 'index.html'}")
    sys.exit(code)


if __name__ == "__main__":
    main()
