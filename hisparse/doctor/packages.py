"""Python and the packages that hisparse loads."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Iterator
from importlib import metadata

from packaging.requirements import Requirement

from hisparse.doctor.findings import Finding, Needs, Status

SHOWN = ("torch", "ray", "nixl", "transformers", "numpy", "pydantic", "fastapi")
CUDA_SHOWN = ("cupy-cuda13x", "triton")
"""NVRTC is not among them: it may come with a CUDA toolkit, and is tried out by a probe of its own."""
OTHER_NAMES = {"cupy-cuda13x": ("cupy-cuda12x", "cupy")}
"""The same package, built for another toolkit."""
Version = Callable[[str], str | None]


def installed(name: str) -> str | None:
    """Version of an installed distribution, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def requirements() -> dict[str, tuple[Requirement, str | None]]:
    """What hisparse's own metadata asks for: by name, the requirement and its extra (None = always). Empty if not installed."""
    found: dict[str, tuple[Requirement, str | None]] = {}
    for text in (metadata.requires("hisparse") or ()) if installed("hisparse") else ():
        requirement = Requirement(text)
        extra = next((name for name in ("cuda", "dev") if requirement.marker is not None
                      and f'extra == "{name}"' in str(requirement.marker)), None)
        if extra != "dev":
            found[requirement.name] = (requirement, extra)
    return found


def probe_python(needs: Needs, *, version: tuple[int, ...] = sys.version_info[:3]) -> Iterator[Finding]:
    text = f"{'.'.join(map(str, version))} at {sys.executable}, {platform.machine()}"
    if version < (3, 11):
        yield Finding(check="python", status=Status.FAIL, text=text, fix="use Python 3.11 or newer")
    else:
        yield Finding(check="python", status=Status.OK, text=text)


def probe_packages(needs: Needs, *, version: Version = installed, has_gpu: Callable[[], bool] | None = None,
                   wanted: dict[str, tuple[Requirement, str | None]] | None = None) -> Iterator[Finding]:
    """A package that is always needed and missing or too old fails; one of the CUDA extra only where there is a GPU."""
    on_gpu = needs.cuda or (has_gpu or _has_gpu)()
    known = requirements() if wanted is None else wanted
    if not known:
        yield Finding(check="hisparse", status=Status.WARN, text="runs from a source tree: versions cannot be compared",
                      fix="pip install -e . in that tree")
    for name in (*SHOWN, *CUDA_SHOWN):
        requirement, extra = known.get(name, (Requirement(name), "cuda" if name in CUDA_SHOWN else None))
        got = next((found for same in (name, *OTHER_NAMES.get(name, ())) if (found := version(same))), None)
        command = f"pip install '{requirement.name}{requirement.specifier}'"
        if got is None and extra == "cuda" and not on_gpu:
            yield Finding(check=name, status=Status.SKIP, text="not installed; only needed with a GPU")
        elif got is None:
            yield Finding(check=name, status=Status.FAIL, text="not installed", fix=command)
        elif not requirement.specifier.contains(got.partition("+")[0], prereleases=True):
            bad = Status.FAIL if extra is None or on_gpu else Status.WARN
            yield Finding(check=name, status=bad, text=f"{got}, needs {requirement.specifier}", fix=command)
        else:
            yield Finding(check=name, status=Status.OK, text=got)


def _has_gpu() -> bool:
    import torch

    return bool(torch.cuda.is_available())
