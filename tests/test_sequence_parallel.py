"""Ranks that share sequences come to the losses, gradient norms and weights of one process."""

from pathlib import Path
from typing import Any

import pytest
import torch

from ds_flux import UserError
from ds_flux.latents import TokenShard
from ds_flux.manifest import checkpoints
from ds_flux.zero.sequence_parallel import check_backend
from tests.conftest import Assets
from tests.distributed import metrics, run_jobs
from tests.pairs import Pairs
from tests.test_parity import LORA

FULL = {"learning_rate": 1e-3}
CHECKPOINTING = {"gradient_checkpointing": "true"}

# name: (processes, family, stage, flags that both have, flags of the ranks that share); eight images in every step
CASES: dict[str, tuple[int, str, int, dict[str, Any], dict[str, Any]]] = {
    "flux1, 2 of 2": (2, "flux1", 3, FULL, {"sequence_parallel": 2, "train_batch_size": 8}),
    "kontext, 4 of 4, checkpointing": (4, "kontext", 3, FULL, {"sequence_parallel": 4, "train_batch_size": 8, **CHECKPOINTING}),
    "flux2, LoRA, 2 of 4": (4, "flux2", 3, LORA, {"sequence_parallel": 2, "train_batch_size": 4}),
    "flux2, stage 2, 4 of 4": (
        4,
        "flux2",
        2,
        FULL,
        {"sequence_parallel": 4, "train_batch_size": 1, "gradient_accumulation_steps": 8},
    ),
    "flux3, 4 of 4": (4, "flux3", 3, FULL, {"sequence_parallel": 4, "train_batch_size": 8}),
}


@pytest.fixture(scope="module")
def folder(pairs: Pairs, assets: Assets, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each case, and beside it one process at stage 0."""
    folder = tmp_path_factory.mktemp("sequence parallel")

    def job(name: str, family: str, stage: int, **flags: Any) -> list[str]:
        return pairs.flags(
            family, folder / name, deepspeed_config=assets.ds_config(stage), max_train_steps=4, proportion_empty_prompts=0.2,
            cond_image_column=None if family == "flux1" else "ref", checkpointing_steps=100,
            text_encoder_deepspeed_config=assets.ds_config(3), **flags,
        )  # fmt: skip

    alone = {f"{family}, {'rank' in both}": (family, both) for _, family, _, both, _ in CASES.values()}
    whole = dict(train_batch_size=8, shard_text_encoder="false")
    run_jobs(1, [job(name, family, 0, **whole, **both) for name, (family, both) in alone.items()], folder)
    for num_ranks in (2, 4):
        mine = {name: case for name, case in CASES.items() if case[0] == num_ranks}
        run_jobs(num_ranks, [job(name, *case[1:3], **case[3], **case[4]) for name, case in mine.items()], folder)
    return folder


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", CASES)
def test_shared_sequences_lose_and_learn_the_same(folder: Path, name: str) -> None:
    _, family, _, both, _ = CASES[name]
    expected, got = metrics(folder / f"{family}, {'rank' in both}"), metrics(folder / name)
    assert len(got) == len({row["loss"] for row in got}) == 4
    for key in ("loss", "grad_norm", "num_images"):
        assert [row[key] for row in got] == pytest.approx([row[key] for row in expected], rel=2e-5), key
    assert [path.name for path in checkpoints(folder / name)] == ["checkpoint-4"]


def test_shards_together_are_the_whole() -> None:
    tokens = torch.arange(24.0).view(2, 6, 2)
    shards = [TokenShard(rank, 3)(tokens, 1) for rank in range(3)]
    assert [shard.shape for shard in shards] == [(2, 2, 2)] * 3
    assert torch.equal(torch.cat(shards, 1), tokens)


WRONG = {
    "heads": ({"sequence_parallel": 3}, "--sequence_parallel 3 does not divide the 4 attention heads of this model"),
    "processes": ({"sequence_parallel": 4}, "--sequence_parallel 4 needs as many processes, and there is 1"),
    "zero": ({"sequence_parallel": 0}, "--sequence_parallel 0 must be 1 or more"),
    "text": (
        {"sequence_parallel": 4, "max_sequence_length": 10},
        "--sequence_parallel 4 does not divide the 10 tokens of the prompt (--max_sequence_length) of 10 tokens",
    ),
    "image": (
        {"sequence_parallel": 2, "use_aspect_ratio_buckets": "true", "aspect_ratio_buckets": "24,24;32,32"},
        "--sequence_parallel 2 does not divide the 9 tokens of the image of 24x24",
    ),
    "reference": (
        {"sequence_parallel": 2, "reference_max_pixels": 24 * 24},
        "--sequence_parallel 2 does not divide the 9 tokens of the reference of 24x24",
    ),
    "a stream": (
        {"sequence_parallel": 2, "streaming": "true", "max_train_steps": 1, "train_batch_size": 1},
        "--streaming with --cond_image_column and --sequence_parallel contradict each other",
    ),
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_cannot_be_shared_is_one_line(pairs: Pairs, tmp_path: Path, run_main: Any, kind: str) -> None:
    flags, message = WRONG[kind]
    done = run_main("train", *pairs.flags("kontext", tmp_path / "out", **flags))
    errors = [line for line in done.errors.splitlines() if line.startswith("ds-flux: error")]
    assert (done.status, len(errors)) == (2, 1), done.errors
    assert message in errors[0]
    assert not (tmp_path / "out").exists()


def test_a_backend_that_cannot_exchange_heads_is_one_line() -> None:
    from diffusers.models.attention_dispatch import AttentionBackendName

    check_backend(None)
    with pytest.raises(UserError, match="does not work with --attention_backend xformers; it does with .*native"):
        check_backend(AttentionBackendName.XFORMERS)
