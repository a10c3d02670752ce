"""Write the pages that are made of the code and of the gate's results: `make docs`."""

from __future__ import annotations

from tests.docs.api import BUILT, INDEX, index, page
from tests.laws.gate import support


def main() -> None:
    BUILT.mkdir(parents=True, exist_ok=True)
    pages = {"api.md": page(), **support.pages(support.read())}
    for name, text in pages.items():
        (BUILT / name).write_text(text)
        print(f"build/docs/{name}: {text.count(chr(10))} lines")
    INDEX.write_text(index())


if __name__ == "__main__":
    main()
