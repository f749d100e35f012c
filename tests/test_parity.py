"""The proof of every distributed feature: losses and gradient norms of one process at stage 0, in every other way to run."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ds_flux.consolidate import consolidate
from ds_flux.families import tiny
from tests.conftest import Assets
from tests.distributed import metrics, run_jobs
from tests.pairs import Pairs

SCRATCH = {"from_scratch": "true", "transformer_config": "{model}/transformer/config.json"}
LORA = {"rank": 4, "lora_alpha": 8, "learning_rate": 1e-2}

ZERO_KEYS = {"zero_hpz_partition_size"}  # what belongs into the DeepSpeed JSON

# name: (processes, flags); eight images in every optimizer step
CASES: dict[str, tuple[int, dict[str, object]]] = {
    "2 processes, stage 0": (2, {"stage": 0}),
    "2 processes, stage 1": (2, {"stage": 1}),
    "2 processes, stage 2": (2, {"stage": 2}),
    "2 processes, stage 2, offload": (2, {"stage": 2, "offload": True}),
    "2 processes, stage 3": (2, {"stage": 3}),
    "2 processes, stage 3, offload": (2, {"stage": 3, "offload": True}),
    "2 processes, stage 3, accumulation 2": (2, {"stage": 3, "train_batch_size": 2, "gradient_accumulation_steps": 2}),
    "2 processes, stage 2, accumulation 4": (2, {"stage": 2, "train_batch_size": 1, "gradient_accumulation_steps": 4}),
    "2 processes, stage 3, checkpointing": (2, {"stage": 3, "gradient_checkpointing": "true"}),
    "2 processes, stage 3, every second block in CPU memory": (
        2,
        {
            "stage": 3,
            "gradient_checkpointing": "true",
            "gradient_checkpointing_every": 2,
            "offload_activations": "true",
        },
    ),
    "2 processes, stage 3, compiled": (2, {"stage": 3, "compile": "true"}),
    "2 processes, stage 3, compiled, LoRA, checkpointing": (
        2,
        {"stage": 3, "compile": "true", "gradient_checkpointing": "true", **LORA},
    ),
    "2 processes, stage 2, compiled": (2, {"stage": 2, "compile": "true"}),
    "2 processes, stage 3, whole text encoder": (2, {"stage": 3, "shard_text_encoder": "false"}),
    "2 processes, stage 3, workers": (2, {"stage": 3, "dataloader_num_workers": 1}),
    "2 processes, stage 2, LoRA": (2, {"stage": 2, **LORA}),
    "2 processes, stage 3, LoRA": (2, {"stage": 3, **LORA}),
    "2 processes, stage 3, LoRA, offload, checkpointing": (
        2,
        {"stage": 3, "offload": True, "gradient_checkpointing": "true", **LORA},
    ),
    "2 processes, stage 3, from scratch": (2, {"stage": 3, **SCRATCH}),
    "4 processes, stage 3, offload": (4, {"stage": 3, "offload": True, "train_batch_size": 2}),
    "4 processes, stage 1, accumulation 2": (
        4,
        {"stage": 1, "train_batch_size": 1, "gradient_accumulation_steps": 2},
    ),
    "4 processes, stage 3, hpZ": (4, {"zero_hpz_partition_size": 2, "stage": 3, "train_batch_size": 2}),
    "4 processes, stage 3, hpZ, LoRA": (4, {"zero_hpz_partition_size": 2, "stage": 3, "train_batch_size": 2, **LORA}),
    "4 processes, stage 3, LoRA": (4, {"stage": 3, "train_batch_size": 2, **LORA}),
}


def job(assets: Assets, folder: Path, name: str, stage: int = 0, offload: bool = False, **flags: object) -> list[str]:
    """The arguments of a case, with a run folder of its own."""
    zero = {key: flags.pop(key) for key in ZERO_KEYS & flags.keys()}
    flags = {key: value.format(model=assets.model) if isinstance(value, str) else value for key, value in flags.items()}
    return assets.flags(
        folder / name, deepspeed_config=assets.ds_config(stage, offload, **zero), checkpointing_steps=100, **flags
    )


@pytest.fixture(scope="module")
def folder(assets: Assets, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All cases, in a few launches."""
    folder = tmp_path_factory.mktemp("parity")
    reference = [
        job(assets, folder, "full", train_batch_size=8),
        job(assets, folder, "LoRA", train_batch_size=8, **LORA),
        job(assets, folder, "from scratch", train_batch_size=8, **SCRATCH),
    ]
    run_jobs(1, reference, folder)
    for launched in dict.fromkeys(map(launch_of, CASES)):
        jobs = [job(assets, folder, name, **flags) for name, (_, flags) in CASES.items() if launch_of(name) == launched]
        run_jobs(launched[0], jobs, folder, timeout_s=480)
    return folder


def launch_of(name: str) -> tuple[int, bool, bool]:
    """Cases of one launch have this in common; a process has groups for hpZ once only, for DeepSpeed keeps them for good."""
    return CASES[name][0], "compiled" in name, "hpZ, LoRA" in name


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", CASES)
def test_same_losses_and_gradient_norms(folder: Path, name: str) -> None:
    expected = metrics(folder / next((kind for kind in ("LoRA", "from scratch") if kind in name), "full"))
    got = metrics(folder / name)
    assert len(got) == 6
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in got] == pytest.approx([row[key] for row in expected], rel=2e-5), key
    assert [row["lr"] for row in got] == [row["lr"] for row in expected]


def test_the_reference_learns_something(folder: Path) -> None:
    """Parity of runs that do nothing would prove nothing."""
    rows = metrics(folder / "full")
    assert len({row["loss"] for row in rows}) == 6
    assert all(row["grad_norm"] > 0.01 for row in rows)
    assert max(row["lr"] for row in rows) > min(row["lr"] for row in rows)


@pytest.mark.parametrize("name", ["4 processes, stage 3, offload", "4 processes, stage 1, accumulation 2"])
def test_same_weights_out_of_any_number_of_ranks(folder: Path, tmp_path: Path, name: str) -> None:
    weights = {}
    for run in ("full", name):
        consolidate(folder / run / "checkpoint-6", tmp_path / run, torch.float32, 10**9)
        weights[run] = load_file(tmp_path / run / "diffusion_pytorch_model.safetensors")
    assert weights[name].keys() == weights["full"].keys()
    for key, value in weights["full"].items():
        torch.testing.assert_close(weights[name][key], value, rtol=1e-4, atol=2e-5)


# every family, on rows with and without references of two shapes, with dropout of prompts and references
FAMILY_KINDS: dict[str, dict[str, object]] = {"full": {"learning_rate": 1e-3}, "LoRA": LORA}
FAMILY_CASES = {
    f"{family}, {kind}, {way}": (family, kind, stage, offload)
    for family in tiny.TINY
    if family != "flux1"
    for kind in FAMILY_KINDS
    for way, stage, offload in [("stage 3 with offload", 3, True), ("stage 2", 2, False)]
    if stage == 3 or kind == "full"
}


def family_job(
    pairs: Pairs, assets: Assets, output_dir: Path, family: str, kind: str, stage: int, offload: bool, **flags: object
) -> list[str]:
    """Four steps of eight images."""
    return pairs.flags(
        family, output_dir, deepspeed_config=assets.ds_config(stage, offload), max_train_steps=4,
        proportion_empty_prompts=0.2, reference_dropout=0.3, augment_references="false", checkpointing_steps=100,
        text_encoder_deepspeed_config=assets.ds_config(3), **{**flags, **FAMILY_KINDS[kind]},
    )  # fmt: skip


@pytest.fixture(scope="module")
def family_folder(pairs: Pairs, assets: Assets, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process at stage 0 with the text encoder whole; two processes in each other way."""
    folder = tmp_path_factory.mktemp("family parity")
    whole = dict(train_batch_size=8, shard_text_encoder="false")
    kinds = [(family, kind) for family in tiny.TINY if family != "flux1" for kind in FAMILY_KINDS]
    run_jobs(
        1,
        [family_job(pairs, assets, folder / f"{family}, {kind}", family, kind, 0, False, **whole) for family, kind in kinds],
        folder,
    )
    jobs = [family_job(pairs, assets, folder / name, *case, train_batch_size=4) for name, case in FAMILY_CASES.items()]
    run_jobs(2, jobs, folder)
    return folder


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", FAMILY_CASES)
def test_every_family_is_the_same_on_two_processes(family_folder: Path, name: str) -> None:
    family, kind, *_ = FAMILY_CASES[name]
    expected, got = metrics(family_folder / f"{family}, {kind}"), metrics(family_folder / name)
    assert len(got) == len({row["loss"] for row in got}) == 4
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in got] == pytest.approx([row[key] for row in expected], rel=2e-5), key
