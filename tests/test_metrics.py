"""What a run shows of itself."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ds_flux.metrics import LossSums, keep_lines_before
from tests.conftest import Assets, Done
from tests.distributed import metrics


def test_loss_by_sigma_bin() -> None:
    losses = LossSums(torch.device("cpu"))
    losses.add(torch.tensor([1.0, 3.0, 99.0]), torch.tensor([0.01, 0.1, 0.2]), torch.tensor([1.0, 1.0, 0.0]))
    losses.add(torch.tensor([8.0]), torch.tensor([1.0]), torch.ones(1))
    figures = LossSums.figures(losses.sums)
    assert figures == {"loss": 4.0, "num_images": 3, "loss_by_sigma/0.000": 2.0, "loss_by_sigma/0.875": 8.0}
    both_ranks = LossSums.figures(losses.sums * 2)
    assert both_ranks == {**figures, "num_images": 6}


def test_a_resumed_run_does_not_repeat_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step}) + "\n" for step in range(1, 6)))
    keep_lines_before(path, 3)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]


def test_tensorboard_and_json_lines_agree(assets: Assets, tmp_path: Path, run_main: Callable[..., Done]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    arguments = assets.flags(tmp_path / "run", deepspeed_config=assets.ds_config(0), max_train_steps=3)
    assert run_main("train", *arguments).status == 0
    lines = metrics(tmp_path / "run")
    events = EventAccumulator(str(tmp_path / "run/logs")).Reload()
    for name in ("loss", "lr", "grad_norm", "images_per_s", "peak_host_memory_gib"):
        assert [event.value for event in events.Scalars(name)] == pytest.approx([line[name] for line in lines], rel=1e-6)
    assert any(tag.startswith("loss_by_sigma/") for tag in events.Tags()["scalars"])
    assert (tmp_path / "run/config.yaml").exists() and (tmp_path / "run/ds_config.json").exists()


def test_a_run_that_diverges_ends_before_it_spoils_a_checkpoint(
    assets: Assets, tmp_path: Path, run_main: Callable[..., Done]
) -> None:
    changes = {"learning_rate": 1e30, "lr_warmup_steps": 0, "max_grad_norm": 0, "checkpointing_steps": 1}
    changes |= {"max_skipped_steps": 3, "checkpoints_total_limit": 1}
    done = run_main("train", *assets.flags(tmp_path / "run", deepspeed_config=assets.ds_config(0), **changes))
    assert done.status == 2
    assert "3 steps in a row were not finite" in done.errors and "resume with a lower --learning_rate" in done.errors
    rows = metrics(tmp_path / "run")
    assert [row["skipped"] for row in rows[-3:]] == [1] * 3 and not rows[-4]["skipped"]
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == [f"checkpoint-{len(rows) - 3}"]
