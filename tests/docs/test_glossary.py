"""No page needs a word that the glossary lacks: what is written in capitals on several pages is in it."""

from __future__ import annotations

import re
from collections import Counter

from tests.docs.api import MODULES, ROOT, public

GLOSSARY = ROOT / "docs/glossary.md"
APART = {"glossary.md", "names.md", "zoo.md", "peers.md"}  # lists of names
PAGES = 3
WORD = re.compile(r"\b[A-Za-z]*[A-Z][A-Za-z]*[A-Z][A-Za-z0-9]*\b")
CODE = re.compile(r"^```.*?^```|`[^`]*`|\]\([^)]*\)", re.MULTILINE | re.DOTALL)
# What is no term of the field: machines and units, formats, names of models, libraries and companies, parts of torch.
KNOWN = re.compile(
    r"CPUs?|GPUs?|CUDA|NVIDIA|AMD|EPYC|NVLink|[KMGT]iB|GB|HTTP|URL|JSONL?|TOML|CSV|HTML|SHA|NaN|README|ID|SIG\w+|CI|OK|"
    r"GPT2?|OSS|LFM2|DeepSeek|OPT|BLOOM|RoBERTa|DeltaNet|TRL|vLLM|DeepSpeed|TorchTitan|INTELLECT|TensorBoard|MLflow|"
    r"PyTorch|AdamW|SGD|GELU|MLPs?|SDPA|ModuleList|ForSequenceClassification"
)


def test_the_glossary_has_what_is_written_in_capitals_on_three_pages() -> None:
    said: Counter[str] = Counter()
    for page in [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]:
        if page.name not in APART:
            said.update(set(WORD.findall(CODE.sub(" ", page.read_text()))))
    ours = {name for module in MODULES for name in public(module)}
    explained = set(WORD.findall(GLOSSARY.read_text()))
    often = {word for word, pages in said.items() if pages >= PAGES and not KNOWN.fullmatch(word)}
    lacking = often - ours - explained
    assert not lacking, f"explain them in docs/glossary.md: {sorted(lacking)}"
