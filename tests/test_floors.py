"""Imports point down: a module may import those of lower floors, or of its own package above it in the list.  And the walls."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "ds_flux"
FLOORS = [
    ["flags", "commands", "sections", "mlperf", "hostfile", "travel", "halving", "speeds", "progress"],
    ["chatter", "clock"],
    ["config", "flow", "latents", "randomness", "runtime", "metrics", "manifest", "streaming", "nodes"],
    ["requests", "failures", "keep", "disks", "findings", "interval"],
    [
        "families.spelling",
        "families.spec",
        "families.decoder",
        "families.flux1",
        "families.flux2",
        "families.flux3",
        "families.registry",
        "families.tiny_autoencoder",
        "families.stock",
        "families.tiny",
        "checks",
        "wholeness",
        "probe",
    ],
    [
        "data.schedule",
        "data.skipped",
        "data.decode",
        "data.captions",
        "data.columns",
        "data.tars",
        "data.tables",
        "data.sources",
        "data.stream",
        "data.buckets",
        "data.shards",
        "data.store",
        "data.cache",
        "data.images",
        "data.shapes",
        "attention",
        "activations",
        "zero.ds_config",
        "zero.sequence_parallel",
        "zero.blocks",
        "zero.machine",
        "zero.memory",
        "zero.weights",
        "zero.engines",
        "zero.files",
        "zero.foreign",
        "zero.nvme",
        "zero.elastic",
        "zero.ema",
        "zero.waits",
        "zero.monitors",
        "zero.counting",
        "lora",
    ],
    ["profiling", "models", "conditioning", "denoiser", "export", "merge", "foreign"],
    ["compare", "fingerprints", "flops"],
    ["assemble", "inputs", "caching", "objective", "checkpoint", "consolidate", "outline"],
    ["validation", "sampling", "fid", "clip"],
    ["gallery", "judges"],
    ["run", "rolling", "plan", "report", "subject", "evaluate_checks", "evaluate_report"],
    ["planned", "trials"],
    ["trainer", "precompute", "dry_run", "sampler", "evaluate", "doctor", "demo", "plan_report", "tune"],
    ["__main__"],
]
FAMILY_MODULES = {f"families.{name}" for name in ("flux1", "flux2", "flux3", "tiny", "tiny_autoencoder", "stock")}
WALLS = {  # third-party package -> the only modules that may import it
    "deepspeed": {
        "runtime",
        "clock",
        "probe",
        "zero.ds_config",
        "zero.weights",
        "zero.engines",
        "zero.elastic",
        "zero.ema",
        "zero.waits",
        "zero.monitors",
        "zero.counting",
        "zero.sequence_parallel",
        "zero.blocks",
        "zero.machine",
        "checkpoint",
        "chatter",
    },  # probe: the accelerator; chatter: its logger
    # flow: the weighting schemes; assemble: the learning-rate schedules
    "diffusers": {*FAMILY_MODULES, "models", "attention", "zero.sequence_parallel", "flow", "assemble"},
    "transformers": {*FAMILY_MODULES, "models", "clip"},
    "torch_fidelity": {"fid"},
    "peft": {"lora"},
    "sklearn": {"demo"},
    "tqdm": {"progress"},
    "matplotlib": {"tune", "report"},
}
ORDER = [module for floor in FLOORS for module in floor]
FLOOR = {module: number for number, floor in enumerate(FLOORS) for module in floor}


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}
PACKAGE_MARKERS = {"__init__", "families", "data", "zero"}


def imported_names(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def target_of(name: str) -> str | None:
    """The module of ours that an imported name lies in; None: the package root."""
    inside = name.removeprefix("ds_flux.") + "."
    return max((module for module in ORDER if inside.startswith(module + ".")), key=len, default=None)


def breaks_a_floor(here: str, there: str) -> bool:
    package = here.split(".")[0]
    same_package = package == there.split(".")[0] and package in ("families", "data", "zero")
    below = FLOOR[there] < FLOOR[here] or (same_package and ORDER.index(there) < ORDER.index(here))
    return not below


@pytest.mark.parametrize("here", sorted(MODULES.keys() - PACKAGE_MARKERS))
def test_imports_point_down_and_keep_the_walls(here: str) -> None:
    assert here in FLOOR, f"{here} has no floor"
    for name in imported_names(MODULES[here]):
        top = name.split(".")[0]
        assert here in WALLS.get(top, {here}), f"{here} imports {top}"
        there = target_of(name) if top == "ds_flux" else None
        assert there is None or not breaks_a_floor(here, there), f"{here} imports {there}"


def test_the_rule_catches_an_upward_import() -> None:
    assert breaks_a_floor("flow", "trainer")
    assert breaks_a_floor("flow", "config"), "siblings are blind to each other"
    assert not breaks_a_floor("trainer", "flow")


def test_no_family_is_named_outside_families() -> None:
    for name, path in MODULES.items():
        if not name.startswith("families"):
            assert not re.search(r"\bflux[123]\b|\bklein\b|\bkontext\b", path.read_text(), re.IGNORECASE), name


def test_nothing_is_decided_by_family_outside_families() -> None:
    """What differs is in the record: no comparison looks at which family it is."""
    for name, path in MODULES.items():
        if not name.startswith("families"):
            for node in ast.walk(ast.parse(path.read_text())):
                operands = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
                words = [ast.unparse(operand) for operand in operands]
                assert not [word for word in words if re.search(r"\bfamily(\.name|\.transformer_class.*)?$", word)], (
                    name,
                    words,
                )


def test_size_of_functions_and_files() -> None:
    for name, path in MODULES.items():
        text = path.read_text()
        assert len(text.splitlines()) <= 350, name
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < 80, f"{name}.{node.name}"


def test_consolidate_starts_light() -> None:
    """Its wall time is a promise: nothing heavier than torch may come in."""
    import subprocess
    import sys

    heavy = {"deepspeed", "diffusers", "transformers", "peft", "datasets"}
    code = f"import sys, ds_flux.consolidate; print({heavy} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "set()"
