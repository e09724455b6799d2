"""Draws docs/pictures/*.svg: `python scripts/pictures.py`. Tests compare the committed files with what this draws.

Pages and blocks over time are those of the real cache manager (`page_life`); the rest is drawn by hand, so keep it true.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from drawing import Drawing
from page_life import Moment, elastic_region, life_of_a_request

from hisparse.cache.residency import PageState

DIRECTORY = Path(__file__).parents[1] / "docs" / "pictures"
STATES = {
    PageState.GPU_ONLY: ("device", "G", "only on the device"), PageState.SPILLING: ("move", "S", "being copied to the host"),
    PageState.CLEAN_PINNED: ("device", "P", "on both, kept on the device"),
    PageState.CLEAN_LOOSE: ("loose", "L", "on both, blocks may go"),
    PageState.HOST_ONLY: ("host", "H", "on the host only"),
}
BLOCKS = {
    "indexer": ("keys", "indexer pages"), "resident": ("device", "resident pages"), "loose": ("loose", "loose pages, readable"),
    "hot": ("hot", "hot regions"), "grown": ("grown", "what regions have grown by"), "free": ("none", "free"),
}


def overview() -> Drawing:
    d = Drawing("hisparse: one decode and one prefill replica",
                "A client asks the ingress, which asks a decode replica. The decode replica asks a prefill replica for the "
                "prompt's KV and reads it by NIXL. In a decode worker each selected position is found on a resident page, in "
                "the hot region or in the host pool.", 430)
    d.box(16, 48, 100, 44, ["client"])
    d.box(196, 48, 150, 44, ["ingress", "OpenAI-compatible"])
    d.arrow((116, 70), (194, 70), words="HTTP", at=(155, 63), anchor="middle")
    d.area(16, 116, 500, 300, "decode replica")
    d.area(572, 116, 212, 300, "prefill replica")
    d.arrow((271, 92), (271, 138))
    d.box(36, 140, 440, 56, ["coordinator actor", "scheduler and HiSparseCoordinator: ids and states, no bytes"])
    d.box(592, 140, 172, 56, ["coordinator actor", "same engine, role prefill"])
    d.arrow((476, 158), (590, 158), words="asks", at=(544, 151), anchor="middle")
    d.arrow((592, 182), (478, 182), words="pages, lease", at=(544, 199), anchor="middle")
    d.arrow((90, 196), (90, 224), words="command", at=(98, 215))
    d.arrow((300, 226), (300, 198), words="acknowledgements", at=(308, 215))
    d.area(36, 226, 440, 116, "worker actor, one for each rank")
    d.box(48, 270, 72, 42, ["top-k"])
    d.arrow((120, 291), (146, 291))
    d.box(148, 254, 96, 74, ["resident", "page"], "device")
    d.box(256, 254, 96, 74, ["hot region", "rows"], "hot")
    d.arrow((352, 291), (376, 291))
    d.box(378, 270, 90, 42, ["attention"])
    d.box(36, 366, 440, 36, ["host pool: one for each node, owned by a keeper actor"], "host", head=False)
    d.arrow((304, 366), (304, 330), words="misses", at=(312, 357))
    d.arrow((196, 328), (196, 364), words="new rows, sealed pages", at=(188, 357), anchor="end")
    d.box(592, 254, 172, 74, ["worker actor", "one for each rank"])
    d.arrow((592, 280), (478, 280), dash=True)
    d.lines(534, 298, ["NIXL READ, then", "generations"], "small", "middle", 15)
    d.box(592, 366, 172, 36, ["host pool"], "host", head=False)
    d.arrow((678, 328), (678, 364))
    return d


def tiers() -> Drawing:
    d = Drawing("The host holds everything; device memory is a write-back cache of it",
                "Left, the device pool: indexer pages, resident pages and hot regions are blocks of one allocation. Right, the "
                "host pool with every page of every layer. New rows are mirrored, sealed pages spilled, missed rows copied to "
                "the hot region.", 352)
    d.area(16, 44, 318, 292, "device pool: blocks of one size")
    d.box(32, 72, 136, 54, ["indexer pages", "keys of every token"], "keys")
    d.box(182, 72, 136, 54, ["free blocks", "for whoever asks"], "none")
    d.box(32, 140, 286, 92, [], "device")
    d.text(44, 160, "resident pages", "head")
    d.text(44, 178, "64 tokens of every layer", "small")
    for i in range(8):
        d.cell(44 + 33 * i, 190, "loose" if i < 3 else "device", "L" if i < 3 else "P" if i < 6 else "G", 26)
    d.box(32, 246, 286, 76, [], "hot")
    d.text(44, 266, "hot region of a host-backed request", "head")
    d.text(44, 283, "single rows, selected lately", "small")
    for i in range(19):
        d.cell(44 + 13.5 * i, 296, "grown" if i > 13 else "hot", "", 11)
    d.area(536, 44, 248, 292, "host pool: the whole latent KV")
    for layer in range(6):
        y = 78 + 42 * layer
        d.text(550, y + 15, f"layer {layer}" if layer < 5 else "...", "small")
        for page in range(7):
            d.cell(604 + 24 * page, y, "host", "", 20)
    d.arrow((318, 156), (534, 120), words="mirror: each new row", at=(366, 122))
    d.arrow((318, 190), (534, 176), words="spill: a sealed page", at=(370, 169))
    d.arrow((534, 222), (320, 216), words="adopt: a page on both", at=(370, 236), dash=True)
    d.arrow((534, 290), (320, 290), words="miss: a selected row", at=(370, 282))
    d.lines(435, 312, ["nothing is lost when", "device blocks go"], "small dim", "middle", 15)
    return d


def request_life() -> Drawing:
    moments = life_of_a_request()
    size, left, top = 18, 230, 92
    d = Drawing("A request's life, page by page",
                "One row for each step of request a, one square for each of its pages. "
                + " ".join(f"Step {m.step}: {', '.join(state.name for state in m.pages['a'])}." for m in moments[::4]),
                top + 22 * len(moments) + 14)
    for i, (kind, letter, words) in enumerate(STATES.values()):
        x, y = (16, 230, 450)[i % 3], 40 + 22 * (i // 3)
        d.cell(x, y, kind, letter, size)
        d.text(x + 26, y + 13, words, "small")
    for i, moment in enumerate(moments):
        y = top + 22 * i
        if moment.event:
            d.rule(16, y - 2, 784, y - 2)
            d.text(16, y + 13, moment.event, "small")
        d.text(left - 12, y + 13, str(moment.step), "small dim", "end")
        for page, state in enumerate(moment.pages["a"]):
            d.cell(left + 22 * page, y, STATES[state][0], STATES[state][1], size)
        d.text(left + 22 * 11 + 14, y + 13, _what_happens(moments[i - 1] if i else None, moment), "small dim")
    return d


def _what_happens(before: Moment | None, now: Moment) -> str:
    """In words, what is new of request a's pages."""
    old = before.pages["a"] if before is not None else ()
    new = now.pages["a"]
    moved = {(old[i] if i < len(old) else PageState.NONE, state) for i, state in enumerate(new)}
    if (PageState.CLEAN_PINNED, PageState.CLEAN_LOOSE) in moved and PageState.HOST_ONLY not in old:
        return "a gets a hot region: clean pages go loose"
    if (PageState.CLEAN_LOOSE, PageState.HOST_ONLY) in moved:
        return "loose blocks are handed to others"
    if (PageState.CLEAN_PINNED, PageState.CLEAN_LOOSE) in moved:
        return "a page is no longer among the last two"
    if (PageState.GPU_ONLY, PageState.SPILLING) in moved:
        return "a page is full: it is spilled"
    if (PageState.SPILLING, PageState.CLEAN_PINNED) in moved:
        return "the copy has completed"
    return "two pages of prompt, spilled behind the forward" if before is None else ""


def resolution() -> Drawing:
    d = Drawing("From a selected position to a row",
                "Each entry of the top-k takes the first that applies: resident page, hot row, host. A miss takes the slot of "
                "a victim, and the row is copied in the same launch.", 372)
    d.text(16, 52, "one CUDA launch for a layer that owns an indexer; the CPU decides nothing, waits for nothing", "small dim")
    d.box(16, 76, 120, 52, ["top-k entry", "position 130"])
    d.box(196, 72, 180, 60, ["page 2 resident?", "block table of the seat"], "device")
    d.arrow((136, 102), (194, 102))
    d.arrow((376, 102), (560, 102), words="yes", at=(384, 95))
    d.box(562, 76, 222, 52, ["row of the resident page", "block * rows + offset + 2"], "device")
    d.arrow((286, 132), (286, 164), words="no", at=(294, 152))
    d.box(196, 166, 180, 60, ["position hot?", "position table of the seat"], "hot")
    d.arrow((376, 196), (560, 196), words="yes: its use counter goes up", at=(384, 189))
    d.box(562, 170, 222, 52, ["row of the hot region", "slot -> block and row"], "hot")
    d.arrow((286, 226), (286, 258), words="no: a miss", at=(294, 246))
    d.box(196, 260, 180, 60, ["host row", "source table of the seat"], "host")
    d.arrow((376, 290), (424, 290))
    d.box(426, 264, 108, 52, ["victim slot", "2-bit clock"], "hot")
    d.arrow((534, 290), (560, 290))
    d.box(562, 264, 222, 52, ["row copied into the slot", "read from host memory"], "hot")
    d.lines(16, 346, ["Entries of -1, or behind the sequence, name no row. A position selected twice: one slot, one copy.",
                      "Layers that share the top-k repeat the copies for their own bytes."], "small dim", step=16)
    return d


def landing() -> Drawing:
    d = Drawing("Prefill/decode: how a prompt's KV lands",
                "Decode asks prefill. Prefill computes, leases its pages and answers. Decode chooses the landing once: "
                "resident if the whole prefix fits the device pool, else host. It reads the pages, then their generations; "
                "any difference fails the import.", 500)
    left, right = 230, 650
    d.box(left - 70, 42, 140, 30, ["decode"])
    d.box(right - 70, 42, 140, 30, ["prefill"])
    d.arrow((left, 72), (left, 490), dash=True)
    d.arrow((right, 72), (right, 490), dash=True)
    middle = (left + right) / 2
    d.arrow((left, 98), (right - 2, 98), words="prompt", at=(middle, 92), anchor="middle")
    d.box(right - 110, 108, 220, 42, ["computes it, and keeps", "its pages under a lease"], head=False)
    d.arrow((right, 172), (left + 2, 172), words="pages, their layout, the lease", at=(middle, 166), anchor="middle")
    d.box(16, 184, 428, 98)
    d.text(28, 204, "landing: chosen once, kept through retries", "head")
    for i, (words, name, kind) in enumerate((("the whole prefix fits the device pool", "RESIDENT", "device"),
                                             ("hot region, tail, indexer and host pages fit", "HOST", "host"),
                                             ("neither", "wait", "none"))):
        d.text(28, 227 + 23 * i, words, "small")
        d.box(322, 213 + 23 * i, 106, 20, [name], kind, head=False)
    d.arrow((right, 308), (left + 2, 308), words="READ pages; indexer pages always to the device", at=(middle, 302),
            anchor="middle")
    d.box(16, 318, 428, 54, [], "move")
    d.lines(28, 340, ["RESIDENT: straight into resident pages",
                      "HOST: by staging slots to host pages; the tail to the device too"], "small")
    d.arrow((left, 394), (right - 2, 394), words="heartbeats renew the lease", at=(middle, 388), anchor="middle", dash=True)
    d.arrow((right, 420), (left + 2, 420), words="READ generations, behind the last byte", at=(middle, 414), anchor="middle")
    d.box(16, 430, 208, 46, ["all equal", "pages are valid, it runs"], "host")
    d.box(236, 430, 240, 46, ["any difference", "nothing is used: recompute, or 503"], "hot")
    d.arrow((476, 453), (right - 2, 453), words="release", at=(563, 447), anchor="middle")
    return d


def spill() -> Drawing:
    d = Drawing("Seal, spill, publish, and back",
                "The coordinator pins a sealed page, the worker enqueues the copy, later sees it complete. Enqueued frees "
                "device blocks behind a fence; completed makes the host page durable and findable.", 452)
    left, right = 200, 600
    d.box(left - 90, 42, 180, 30, ["coordinator: ids"])
    d.box(right - 90, 42, 180, 30, ["worker: bytes"])
    d.arrow((left, 72), (left, 352), dash=True)
    d.arrow((right, 72), (right, 352), dash=True)
    for y, x, kind, lines in (
        (86, left, "device", ["64 accepted tokens: the page is sealed.",
                                "Pins the page and a host block, gives the copy an id."]),
        (156, right, "move", ["The forward; behind it the copy, on a stream of its own,",
                               "and a mask of the rows that are there."]),
        (226, left, "loose", ["Drops the copy's pin. Blocks that are free now go on",
                               "with a fence: to be written behind copy 7 only."]),
        (298, left, "host", ["Mask full: the host page is durable, its key published,",
                              "other requests find it. Else: again, with bytes."]),
    ):
        d.box(x - 184, y, 368, 42, lines, kind, head=False)
    for y, words, back in ((146, "command of the step: spill 7, blocks", False), (216, "enqueued 7", True),
                           (286, "completed 7, row mask", True)):
        d.arrow((right, y) if back else (left, y), (left + 2, y) if back else (right - 2, y), words=words, at=(400, y - 6),
                anchor="middle")
    d.rule(16, 360, 784, 360)
    d.text(16, 380, "back to the device", "head")
    d.lines(16, 399, ["row by row: what decode selects is copied into the hot region (a miss)",
                      "a prefix hit adopts device blocks that still hold the page, without a copy",
                      "for a chunk of a prompt, history that only the host has is gathered to a workspace, layer by layer"],
            "small")
    return d


def elastic() -> Drawing:
    moments = [moment for moment in elastic_region() if moment.step >= 13]
    total = sum(moments[0].blocks.values())
    left, top, height, step = 60, 112, 236, 24
    d = Drawing("A hot region grows while blocks are free, and gives them back",
                "Blocks of the device pool by what holds them, step by step. "
                + " ".join(f"Step {m.step}: {m.blocks['grown']} grown, {m.blocks['free']} free." for m in moments[::3]),
                top + height + 62)
    for i, (kind, words) in enumerate(BLOCKS.values()):
        x, y = (16, 200, 420)[i % 3], 40 + 22 * (i // 3)
        d.cell(x, y, kind, "", 16)
        d.text(x + 24, y + 12, words, "small")
    for value in range(0, total + 1, 10):
        y = top + height * (1 - value / total)
        d.rule(left - 4, y, left + step * len(moments), y)
        d.text(left - 10, y + 4, str(value), "small dim", "end")
    d.text(16, top - 6, "blocks", "small dim")
    for i, moment in enumerate(moments):
        x, y = left + step * i, float(top + height)
        for name, (kind, _) in BLOCKS.items():
            size = height * moment.blocks[name] / total
            y -= size
            d.bar(x + 2, y, step - 4, size, kind)
        if not i % 2:
            d.text(x + step / 2, top + height + 16, str(moment.step), "small dim", "middle")
        if moment.event:
            d.text(x + 2, top + height + 36 + 16 * (sum(bool(m.event) for m in moments[:i]) % 2), moment.event, "small")
            d.rule(x, top + height, x, top + height + 34)
    return d


PICTURES: dict[str, Callable[[], Drawing]] = {
    "overview": overview, "tiers": tiers, "request-life": request_life, "resolution": resolution, "landing": landing,
    "spill": spill, "elastic": elastic,
}


def files() -> dict[Path, str]:
    """Path and text of every picture."""
    return {DIRECTORY / f"{name}.svg": draw().svg() for name, draw in PICTURES.items()}


if __name__ == "__main__":
    DIRECTORY.mkdir(exist_ok=True)
    for path, text in files().items():
        path.write_text(text)
        print(path.relative_to(DIRECTORY.parents[1]))
