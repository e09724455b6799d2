"""What the demo prints: one table per setting, the tier counters, the verdicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from hisparse.demo.client import Answer
from hisparse.demo.reference import Reference


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One thing the demo promises. `detail` has the numbers."""

    ok: bool
    claim: str
    detail: str


def answers_table(title: str, answers: Sequence[Answer]) -> Table:
    """One line per request."""
    table = Table(title=title, title_justify="left", header_style="bold")
    table.add_column("request")
    for name in ("prompt\ntokens", "cached\ntokens"):
        table.add_column(name, justify="right")
    table.add_column("landing")
    for name in ("resident\nrows", "hot\nrows", "host\nrows", "spilled\npages", "host\nreads", "TTFT\ns", "tokens\nper s"):
        table.add_column(name, justify="right")
    table.add_column("answer")
    for answer in answers:
        if answer.error:
            table.add_row(answer.prompt.name, *[""] * 10, f"[red]{answer.error[:60]}")
            continue
        rows = answer.stats.get("resolve", {})
        verdict = "[green]right" if answer.prompt.is_right(answer.text) else f"[red]not {answer.prompt.answer}"
        said = (answer.text.split() or ["-"])[0]
        table.add_row(
            answer.prompt.name, str(answer.prompt_tokens), str(answer.cached_tokens), str(answer.stats.get("landing") or "-"),
            number(rows.get("resident_rows", 0)), number(rows.get("hot_rows", 0)), number(host_rows(rows)),
            str(answer.stats.get("spilled_pages", 0)), size(rows.get("host_to_device_bytes", 0)),
            f"{answer.first_token_s:.1f}", f"{answer.tokens_per_s:.1f}",
            f"{said} {verdict}",
        )
    return table


def host_rows(rows: Mapping[str, Any]) -> int:
    """Rows read from the host pool: hot misses and non-resident history of prefill chunks."""
    return int(rows.get("miss_rows", 0)) + int(rows.get("prefill_host_rows", 0))


def parity(answers: Sequence[Answer], references: Sequence[Reference]) -> Verdict:
    """Token by token against unmodified transformers."""
    equal = 0
    excused: list[str] = []
    wrong: list[str] = []
    for answer, reference in zip(answers, references):
        got = tuple(answer.token_ids)
        if got == reference.token_ids:
            equal += 1
            continue
        pairs = enumerate(zip(got, reference.token_ids))
        first = next((i for i, (a, b) in pairs if a != b), min(len(got), len(reference.token_ids)))
        (excused if reference.first_excusable <= first else wrong).append(f"{answer.prompt.name} at token {first}")
    detail = f"{equal} of {len(answers)} requests equal"
    if excused:
        detail += f"; behind a tie below 1e-6 in the reference's own scores: {', '.join(excused)}"
    if wrong:
        detail += f"; DIFFERENT: {', '.join(wrong)}"
    return Verdict(ok=not wrong, claim="tokens equal unmodified transformers", detail=detail)


def recall(answers: Sequence[Answer]) -> Verdict:
    """The answers mean something; one miss of the small model is allowed, a wrong token is not."""
    right = sum(answer.prompt.is_right(answer.text) for answer in answers)
    return Verdict(ok=right >= len(answers) - 1, claim="questions answered right", detail=f"{right} of {len(answers)}")


def counters(claims: Mapping[str, int]) -> list[Verdict]:
    """Tiers that must really have been used: each count > 0."""
    return [Verdict(ok=count > 0, claim=f"{name} > 0", detail=f"{count:,}") for name, count in claims.items()]


def print_verdicts(console: Console, verdicts: Sequence[Verdict]) -> None:
    for verdict in verdicts:
        console.print(f"  {'[green]ok  ' if verdict.ok else '[red bold]FAIL'}[/] {verdict.claim}: {verdict.detail}")


def number(value: int) -> str:
    """12,345 -> '12.3k'."""
    return str(value) if value < 10_000 else f"{value / 1e3:.0f}k" if value < 1_000_000 else f"{value / 1e6:.1f}M"


def size(num_bytes: int) -> str:
    """Bytes as MB."""
    return "0" if not num_bytes else f"{num_bytes / 1e6:.1f} MB"
