"""A run goes on from a checkpoint of any other number of processes, ZeRO stage and place of the optimizer."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from tqdm import tqdm

from ds_flux import runtime
from ds_flux.streaming import in_memory, whole
from ds_flux.zero.elastic import Layout, fill, share
from ds_flux.zero.files import partitioned
from tests import elastic
from tests.conftest import Assets
from tests.distributed import run_jobs

STEP, LAST = 2, 4
KINDS: dict[str, dict[str, Any]] = {"full": {}, "LoRA": {"rank": 4, "lora_alpha": 8, "learning_rate": 1e-2}}
SIZES, STAGES = (1, 2, 4), (1, 2, 3)
# what DeepSpeed deals out in yet another way, spread over the table
ZERO: dict[tuple[int, int], dict[str, Any]] = {
    (2, 2): {"round_robin_gradients": True},
    (4, 1): {"offload": True},
    (2, 3): {"sub_group_size": 5_000},
    (1, 3): {"offload": True},
    (4, 3): {"stage3_param_persistence_threshold": 500},
}
# four processes are slow where there are fewer cores: of a LoRA at stage 3 only
LAYOUTS = [at for at in product(KINDS, SIZES, STAGES) if at[:2] != ("LoRA", 4) or at[2] == 3]


def name_of(kind: str, size: int, stage: int) -> str:
    return f"{kind}, {size} at stage {stage}"


def sources(kind: str, size: int, stage: int) -> list[str]:
    """A checkpoint of each number of processes, so that all layouts together have gone from every stage to every stage."""
    shifts = [(SIZES.index(other) - SIZES.index(size)) % 3 + 1 for other in SIZES]
    found = [(kind, other, STAGES[(stage - 1 + shift) % 3]) for other, shift in zip(SIZES, shifts)]
    found = [at if at in LAYOUTS else (*at[:2], 3) for at in found]
    return [name_of(*at) for at in found if at != (kind, size, stage)]


def job(assets: Assets, folder: Path, function: str, kind: str, size: int, stage: int) -> dict[str, Any]:
    """Make the checkpoint of a layout, or go on from those of other layouts; eight images a step."""
    name = name_of(kind, size, stage)
    argv = assets.flags(
        folder / name, deepspeed_config=assets.ds_config(stage, **ZERO.get((size, stage), {})), train_batch_size=8 // size,
        shard_text_encoder="false", **KINDS[kind],
    )  # fmt: skip
    checkpoints = [str(folder / source / f"checkpoint-{STEP}") for source in sources(kind, size, stage)]
    work = [str(folder / name), STEP] if function == "make" else [checkpoints, str(folder / f"{name}.pt")]
    return {"function": f"tests.elastic:{function}", "args": [name, argv, *work, LAST]}


@pytest.fixture(scope="module")
def folder(assets: Assets, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All checkpoints, and where a run of each layout came to that went on from some of them."""
    folder = tmp_path_factory.mktemp("elastic")
    runtime.init()
    for size, *functions in [(1, "make"), (2, "make"), (4, "make", "go_on"), (2, "go_on"), (1, "go_on")]:
        jobs = [job(assets, folder, function, *at) for function in functions for at in LAYOUTS if at[1] == size]
        if size > 1:
            run_jobs(size, jobs, folder)
        else:  # no launch: this process is one
            for one in jobs:
                getattr(elastic, one["function"].split(":")[1])(*one["args"])
    return folder


def test_the_table_is_full() -> None:
    """Every number to every number, every stage to every stage, and no layout to itself."""
    for kind in KINDS:
        pairs = [(at, source) for at in LAYOUTS if at[0] == kind for source in sources(*at)]
        assert len(pairs) == len(set(pairs)) >= 20 and all(name_of(*at) != source for at, source in pairs)
        assert {(at[2], source[-1]) for at, source in pairs} == set(product(STAGES, "123"))
        assert {(at[1], source.split()[1]) for at, source in pairs} >= set(product(SIZES, "124")) - {(4, "4")}


@pytest.mark.parametrize("old,new", product(product((1, 2, 3), (1, 2, 3, 5)), repeat=2))
def test_what_is_dealt_out_is_all_there(old: tuple[int, int], new: tuple[int, int]) -> None:
    """From any stage and number of ranks to any other, with sizes that nothing divides and gaps between the tensors."""
    generator, shapes = torch.Generator().manual_seed(0), {"a": torch.Size([7, 3]), "b": torch.Size([5]), "c": torch.Size([31])}
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    pieces = [whole(name, tensor) for name, tensor in tensors.items()]
    for (stage, size), gaps in ((old, [3, 2, 0]), (new, [0, 1, 0])):
        layout = Layout.of({"zero_optimization": {"stage": stage}}, size, [shapes])
        numel = sum(-(-shape.numel() // size) for shape in shapes.values()) if stage == 3 else 61 // size + 1
        flats = [torch.zeros(numel) for _ in range(size)]
        for rank, flat in enumerate(flats):
            fill(flat, share(pieces, layout, rank, numel, gaps), tqdm(disable=True))
        pieces = partitioned(stage, [shapes], [flats], [gaps])
    assert all(torch.equal(in_memory(piece), tensors[piece.name]) for piece in pieces) and len(pieces) == 3


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind,size,stage", LAYOUTS)
def test_goes_on_from_other_layouts(folder: Path, kind: str, size: int, stage: int) -> None:
    found = torch.load(folder / f"{name_of(kind, size, stage)}.pt")
    assert list(found) == sources(kind, size, stage)
    for source, row in found.items():
        assert row["first"] == STEP
        # DeepSpeed's own look at its optimizer takes one weight for another where it deals gradients out in turn
        assert row["is_equal"] or any("2 at stage 2" in name for name in (source, name_of(kind, size, stage))), source
        for key in ("loss", "grad_norm", "lr"):
            assert [f[key] for f in row["figures"]] == pytest.approx([f[key] for f in row["kept"]], rel=2e-5), (source, key)
