"""--profile: traces of chosen steps, and a page of them."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import TRANSFORMER, Assets, Done
from tests.distributed import metrics, run_jobs
from tests.test_errors import one_line


@pytest.fixture(scope="module")
def runs(assets: Assets, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run with and without, on two ranks; and one whose last step is looked into."""
    folder = tmp_path_factory.mktemp("profiling")
    common = {"max_train_steps": 4, "gradient_checkpointing": "true", "deepspeed_config": assets.ds_config(3, True)}
    jobs = [
        assets.flags(folder / "with", **common, profile="2-3"),
        assets.flags(folder / "without", **common),
        assets.flags(folder / "last", **{**common, "max_train_steps": 2}, profile="2"),
    ]
    run_jobs(2, jobs, folder)
    return folder


def test_traces_of_every_rank(runs: Path) -> None:
    for rank in range(2):
        events = json.loads(gzip.decompress((runs / f"with/profile/rank-{rank}.json.gz").read_bytes()))["traceEvents"]
        names = {event.get("name", "") for event in events}
        assert {"step 2", "step 3", "aten::mm"} <= names and not {"step 1", "step 4"} & names


def test_the_page_tells_of_operators_modules_and_collectives(runs: Path) -> None:
    page = (runs / "with/profile/profile.md").read_text()
    assert "# Profile of steps 2 to 3, rank 0 of 2" in page and "aten::mm" in page
    blocks = next(line for line in page.splitlines() if "FluxTransformerBlock" in line)
    assert blocks.split(" | ")[2] == str(TRANSFORMER["num_layers"]) and float(blocks.split(" | ")[3]) > 0
    gathers = [line for line in page.splitlines() if line.startswith("| all_gather_into_tensor")]
    assert gathers and all(int(line.split(" | ")[2]) > 0 for line in gathers)


def test_looking_changes_nothing(runs: Path) -> None:
    figures = [[(row["loss"], row["grad_norm"]) for row in metrics(runs / name)] for name in ("with", "without")]
    assert figures[0] == figures[1]


def test_no_step_after(runs: Path) -> None:
    assert "no step followed" in (runs / "last/profile/profile.md").read_text()


@pytest.mark.parametrize("asked", ["7-5", "0", "soon"])
def test_bad_steps(asked: str, assets: Assets, tmp_path: Path, run_main: Callable[..., Done]) -> None:
    one_line(run_main("train", *assets.flags(tmp_path / "run"), "--profile", asked), f"--profile {asked}: expected a step")
