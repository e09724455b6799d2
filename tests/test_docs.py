"""Links, anchors and paths of the documentation lead somewhere, and the index names every page."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted(ROOT / name for name in (
    "README.md", "kernels/README.md", "benchmarks/README.md", *(str(path.relative_to(ROOT)) for folder in ("docs", "deploy")
                                                              for path in (ROOT / folder).rglob("*.md"))))
FENCE = re.compile(r"^```.*?^```", re.S | re.M)
OF_THE_DESIGN = {"hisparse/cli.py"}
"""Paths that docs/deviations.md quotes from the design."""
FOREIGN = {
    "ReqToTokenPool", "TokenToKVPoolAllocator", "build_connector_meta", "get_finished", "out_cache_loc", "req_pool_idx",
    "req_to_token", "request_finished", "slot_mapping", "start_load_kv", "wait_for_save", "cudaMemcpy",
}
"""Names of other projects."""
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
PATH = re.compile(r"`((?:hisparse|docs|tests|scripts|benchmarks|kernels|deploy)/[\w./*-]+?)(?:::[\w\[\]-]+)?`")


def text_of(page: Path) -> str:
    """Without fenced blocks, in which nothing is a link."""
    return FENCE.sub("", page.read_text())


def anchors(page: Path) -> set[str]:
    """Of the headings, as forges make them: lower case, punctuation dropped, hyphens for spaces, -1 for a second one."""
    found: dict[str, int] = {}
    names = set()
    for heading in re.findall(r"^#+ (.+?)\s*$", text_of(page), re.M):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        slug = re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")
        count = found[slug] = found.get(slug, -1) + 1
        names.add(f"{slug}-{count}" if count else slug)
    return names


def dead_links(page: Path) -> list[str]:
    dead = []
    for target in LINK.findall(text_of(page)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        if not path.exists() or not path.is_relative_to(ROOT) or (anchor and anchor not in anchors(path)):
            dead.append(target)
    return dead


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert not dead_links(page)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_exist(page: Path) -> None:
    gone = {path for path in PATH.findall(text_of(page)) if not list(ROOT.glob(path.rstrip("/")))}
    assert not gone - OF_THE_DESIGN


def test_a_dead_link_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("# A `b` c, d\n## Twice\n## Twice\n[1](gone.md) [2](page.md#a-b-c-d) [3](#twice-1) [4](#twice-2) [5](https://x)\n"
                    "![6](gone.svg) [7](../outside.md)\n```\n[8](gone.md)\n```\n")
    (tmp_path.parent / "outside.md").touch()
    assert dead_links(page) == ["gone.md", "#twice-2", "gone.svg", "../outside.md"]


def test_the_index_names_every_page() -> None:
    index = ROOT / "docs" / "README.md"
    linked = {(index.parent / target.partition("#")[0]).resolve() for target in LINK.findall(text_of(index))}
    assert not {page for page in PAGES if page.parent == ROOT / "docs"} - linked - {index}
    assert (ROOT / "docs" / "examples" / "embed.py") in linked
    assert "docs/README.md" in LINK.findall((ROOT / "README.md").read_text())


@pytest.mark.parametrize("name", ["architecture", "concepts", "control-plane", "embedding", "host-pool", "kernels", "pd"])
def test_names_of_the_code_are_in_the_code(name: str) -> None:
    """Words in code style with an underscore, a dot or a capital inside: an identifier that is gone is a stale page."""
    words = set(re.findall(r"`([A-Za-z_][\w.]*)(?:\([^`]*\))?`", text_of(ROOT / "docs" / f"{name}.md")))
    names = {word.rpartition(".")[2] for word in words if re.search(r"[_.]|[a-z][A-Z]", word)}
    assert not names - _identifiers() - FOREIGN


@functools.cache
def _identifiers() -> set[str]:
    sources = [path for folder in ("hisparse", "kernels", "tests", "scripts", "benchmarks", "deploy")
               for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".cu", ".cuh", ".yaml")]
    return {word for path in sources if path != Path(__file__) for word in re.findall(r"[A-Za-z_]\w*", path.read_text())} | {
        path.suffix[1:] for path in sources} | {"md", "sh", "svg", "json"}


def test_every_picture_is_shown() -> None:
    links = {(page.parent / target).resolve() for page in PAGES for target in LINK.findall(text_of(page))}
    shown = {path for path in links if path.suffix == ".svg"}
    assert shown == set((ROOT / "docs" / "pictures").iterdir())


def test_every_benchmark_is_listed() -> None:
    listed = set(re.findall(r"^\| `(bench_\w+\.py)`", (ROOT / "benchmarks" / "README.md").read_text(), re.M))
    assert listed == {path.name for path in (ROOT / "benchmarks").glob("bench_*.py")}
