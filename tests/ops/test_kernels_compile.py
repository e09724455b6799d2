"""Every kernel instance compiles for Hopper and Blackwell (or for the one it is written for), without a GPU."""

from __future__ import annotations

import importlib

import pytest

from hisparse.errors import ConfigError
from hisparse.ops.cuda.module import Instance, compile_cubin
from hisparse.ops.sources import kernel_sources

WRAPPERS = ("append", "attention_cluster", "mirror", "indexer", "pages", "replay", "resolve")
INSTANCES = [instance for name in WRAPPERS for instance in importlib.import_module(f"hisparse.ops.cuda.{name}").INSTANCES]


def _name(instance: Instance) -> str:
    return "-".join([instance.function, *(f"{key}={value}" for key, value in sorted(instance.defines.items()))])


@pytest.mark.parametrize(
    ("instance", "architecture"),
    [(instance, architecture) for instance in INSTANCES for architecture in ("sm_90a", "sm_100a")
     if instance.architecture in ("", architecture)],
    ids=lambda value: value if isinstance(value, str) else _name(value))
def test_compiles(instance: Instance, architecture: str) -> None:
    assert compile_cubin(instance, architecture)[:4] == b"\x7fELF"


def test_every_source_has_an_instance() -> None:
    assert {path.name for path in kernel_sources().glob("*.cu")} == {instance.source for instance in INSTANCES}


def test_a_source_that_does_not_compile_is_told_with_the_compilers_words(tmp_path, monkeypatch) -> None:
    (tmp_path / "broken.cu").write_text('extern "C" __global__ void broken() { undeclared = 1; }\n')
    monkeypatch.setattr("hisparse.ops.cuda.module.kernel_sources", lambda: tmp_path)
    with pytest.raises(ConfigError, match=r"(?s)does not compile for sm_90a.*undeclared"):
        compile_cubin(Instance("broken.cu", "broken"), "sm_90a")
