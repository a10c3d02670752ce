"""The documentation as a site (mkdocs): pages made of the code and of files outside of docs/, and links that lead to them.

mkdocs.yml names this file under `hooks`; `make site` builds build/site. Nothing that is written here is committed.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # mkdocs loads this file by its path

import griffe  # noqa: E402
from mkdocs.structure.files import File, Files  # noqa: E402

from tests.docs.api import MODULES, public  # noqa: E402
from tests.laws.gate import support  # noqa: E402

# Pages that lie elsewhere in the repository, and where the site has them.
OUTSIDE = {
    "README.md": "index.md",
    "docs/README.md": "pages.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "DECISIONS.md": "decisions.md",
    "benchmarks/README.md": "benchmarks.md",
}
WIDE = ".md-grid { max-width: 76rem; }\n"  # room for a line of code, of 120 characters, between both columns of links
MADE = "build/docs/"  # whose links lead to what is made here
LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]\n]*)\]\((?P<target>(?!https?:|#|mailto:)[^)\s]+)\)")
FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
# What a docstring says in a sentence of its own, after its name.
LABEL = re.compile(r"\n(?=(?:Wire|Memory|Wire, memory|Raises|Returns|Source|Cost)\b[^\n:]{0,12}: )")


def on_config(config: Any) -> Any:
    """Every page of the reference is in the navigation."""
    part = next(each for each in config["nav"] if "Reference" in each)
    part["Reference"].insert(1, {"Rooms": [{name[4:-3]: name} for name in reference() if name != "api/index.md"]})
    return config


def on_files(files: Files, config: Any) -> Files:
    if (listed := files.get_file_from_path("README.md")) is not None:  # else it would be the first page
        files.remove(listed)
    files.append(File.generated(config, "wide.css", content=WIDE))
    for source, target in OUTSIDE.items():
        files.append(File.generated(config, target, content=(ROOT / source).read_text()))
    for name, text in {**support.pages(support.read()), **reference()}.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links to pages of the site; where one leads to code, its text alone is left."""
    place = page.file.src_uri
    origin = {target: source for source, target in OUTSIDE.items()}.get(place, f"docs/{place}")

    def mended(link: re.Match[str]) -> str:
        target, _, anchor = link["target"].partition("#")
        path = os.path.normpath(os.path.join(os.path.dirname(origin), target))
        where = OUTSIDE.get(path) or path.removeprefix(MADE if path.startswith(MADE) else "docs/")
        if files.get_file_from_path(where) is None:
            return link["text"]
        target = os.path.relpath(where, os.path.dirname(place) or ".") + "#" * bool(anchor) + anchor
        return f"{link['image']}[{link['text']}]({target})"

    if place.startswith("api/"):
        return markdown
    parts = FENCE.split(markdown)
    return "".join(part if part.startswith("```") else LINK.sub(mended, part) for part in parts)


@cache
def reference() -> dict[str, str]:
    """A page of each room, with every public name where it is shortest to reach, and the list of these pages."""
    listed: list[Any] = []
    pages = {}
    for module in MODULES:
        room = module.__name__
        text = [f"# {room}", "", *([inspect.getdoc(module) or "", ""])]
        for name, value in public(module).items():
            if any(value is other for other in listed):
                continue
            if inspect.isclass(value) or inspect.isfunction(value):
                listed.append(value)
                text += [f"::: {room}.{name}", ""]
            else:
                text += [f"## {name}", "", f"A value: a `{type(value).__name__}`.", ""]
        pages[f"api/{room}.md"] = "\n".join(text)
    lines = [f"- [{module.__name__}]({module.__name__}.md): {_first_line(module)}" for module in MODULES]
    intro = "Every public name with its signature, docstring, attributes and methods, by the room that names it."
    return {"api/index.md": "\n".join(["# Reference", "", intro, "", *lines, ""]), **pages}


def _first_line(module: Any) -> str:
    return (inspect.getdoc(module) or "").split("\n")[0]


class Paragraphs(griffe.Extension):
    """Docstrings here are plain text: what begins with `Wire:`, `Raises:` or another label is a paragraph on the page."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            # a[i][j] is no link
            obj.docstring.value = LABEL.sub("\n\n", obj.docstring.value).replace("][", "]\\[")
