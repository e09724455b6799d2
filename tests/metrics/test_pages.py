"""docs/metrics.md, the dashboard and the alert rules against the catalogue; and by promtool where there is one."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from hisparse.metrics import CATALOGUE, Kind, Metric

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "deploy" / "ray" / "grafana" / "hisparse.json"
PROMETHEUS = ROOT / "deploy" / "ray" / "prometheus"
SERIES = {f"{metric.exported}{suffix}": metric for metric in CATALOGUE
          for suffix in (("_bucket", "_sum", "_count") if metric.kind is Kind.HISTOGRAM else ("",))}
RULES = [rule for group in yaml.safe_load((PROMETHEUS / "rules.yaml").read_text())["groups"] for rule in group["rules"]]
PROMTOOL = os.environ.get("PROMTOOL") or shutil.which("promtool")
promtool = pytest.mark.skipif(PROMTOOL is None, reason="needs promtool (Debian: apt-get install prometheus)")


def pages() -> Any:
    spec = importlib.util.spec_from_file_location("metrics_pages", ROOT / "scripts" / "metrics_pages.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def panels() -> list[dict[str, Any]]:
    return [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]


def queries() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel["targets"]]


def check_expression(expression: str) -> set[str]:
    """The metrics an expression reads. Names and labels must be the catalogue's, filters closed, `by` sensible."""
    used: list[Metric] = []
    for name in re.findall(r"\bray_hisparse_\w+", expression):
        assert name in SERIES, f"{name} is not in the catalogue"
        used.append(SERIES[name])
    assert used, expression
    allowed = {"le", *(label for metric in used for label in metric.labels)}
    for name, body in re.findall(r"(ray_hisparse_\w+)\{([^}]*)\}", expression):
        for label in re.findall(r"(\w+)\s*[=!]~?\s*\"", body):
            assert label in SERIES[name].labels, f"{name} has no label {label}"
    for body in re.findall(r"\b(?:by|on) \(([^)]*)\)", expression):
        assert {label.strip() for label in body.split(",")} - {""} <= allowed, f"by ({body}) in {expression}"
    for inner in re.findall(r"(?:rate|increase)\((ray_hisparse_\w+)", expression):
        assert SERIES[inner].kind is not Kind.GAUGE, f"rate of the gauge {inner}"
    bare = re.sub(r"(?:rate|increase)\([^\[]*\[[^\]]*\]\)", "", expression)
    for name in re.findall(r"\bray_hisparse_\w+", bare):
        assert SERIES[name].kind is Kind.GAUGE, f"{name} is a counter and read without rate() or increase()"
    for opening, closing in ("()", "{}", "[]"):
        assert expression.count(opening) == expression.count(closing), expression
    return {metric.name for metric in used}


def test_the_committed_pages_are_what_the_catalogue_says() -> None:
    for path, text in pages().files().items():
        assert path.read_text() == text, f"{path} is stale: run python scripts/metrics_pages.py"


def test_docs_list_every_metric_once() -> None:
    names = re.findall(r"^\| `(ray_hisparse_\w+)`", (ROOT / "docs" / "metrics.md").read_text(), re.M)
    assert names == [metric.exported for metric in CATALOGUE]


def test_the_example_in_the_docs_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (snippet,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "metrics.md").read_text(), re.S)

    class Core:
        def stats(self) -> Any:
            return self

        def asdict(self) -> dict[str, Any]:
            return {"steps": 7}

    exec(compile(snippet, "metrics.md", "exec"), {"core": Core()})
    assert 'ray_hisparse_steps_total{model="my-model",role="colocated",engine="engine-0"} 7' in capsys.readouterr().out


def test_the_dashboard_shows_every_metric_and_no_other() -> None:
    assert set().union(*map(check_expression, queries())) == {metric.name for metric in CATALOGUE}


def test_the_dashboard_is_laid_out() -> None:
    board = json.loads(DASHBOARD.read_text())
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken and at["x"] + at["w"] <= 24, panel["title"]
        taken |= cells
    variables = {variable["name"] for variable in board["templating"]["list"]}
    assert set(re.findall(r"\$\{?(\w+)", json.dumps(board["panels"]))) <= variables | {"__rate_interval"}
    for panel in panels():
        assert panel["title"] and panel["fieldConfig"]["defaults"]["unit"]
        for target in panel["targets"]:
            own = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            grouped = {name.strip() for body in re.findall(r"by \(([^)]*)\)", target["expr"]) for name in body.split(",")}
            assert own <= grouped, f"the legend of {panel['title']} names labels that the query drops: {own - grouped}"


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_every_alert_says_what_to_do(rule: dict[str, Any]) -> None:
    check_expression(rule["expr"])
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert len(rule["annotations"]["summary"]) > 15 and len(rule["annotations"]["runbook"]) > 120
    kept = {name.strip() for body in re.findall(r"by \(([^)]*)\)", rule["expr"]) for name in body.split(",")}
    named = set(re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"])))
    assert named <= kept, f"labels that the expression drops: {named - kept}"


@pytest.mark.parametrize("path", ["deploy/ray/prometheus/rules.yaml", "deploy/ray/README.md", "docs/operations.md"])
def test_options_that_texts_name_exist(path: str) -> None:
    from hisparse.config import HiSparseConfig

    sections = {name: field.annotation for name, field in HiSparseConfig.model_fields.items()}
    named = re.findall(r"(?<![/\w])(cache|scheduler|model|pd|serve|telemetry)\.(\w+)", (ROOT / path).read_text())
    assert len(named) > 5
    for section, option in named:
        assert option in sections[section].model_fields, f"{section}.{option}"  # type: ignore[union-attr]


def test_every_alert_is_fired_in_the_rules_own_tests() -> None:
    fired = set(re.findall(r'alertname="(\w+)"', (PROMETHEUS / "rules_test.yaml").read_text()))
    assert fired == {rule["alert"] for rule in RULES}


@promtool
def test_promtool_accepts_rules_their_tests_and_every_query(tmp_path: Path) -> None:
    def run(*arguments: str, cwd: Path = PROMETHEUS) -> None:
        done = subprocess.run([str(PROMTOOL), *arguments], cwd=cwd, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr

    run("check", "rules", "rules.yaml")
    run("test", "rules", "rules_test.yaml")
    known = [query.replace("$__rate_interval", "5m").replace("$model", ".*").replace("$engine", ".*") for query in queries()]
    rules = [{"record": f"panel_{i}", "expr": query} for i, query in enumerate(known)]
    (tmp_path / "panels.yaml").write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    run("check", "rules", "panels.yaml", cwd=tmp_path)
