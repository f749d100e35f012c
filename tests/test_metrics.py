"""What a run shows of itself."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ds_flux.metrics import LossSums, keep_lines_before
from tests.conftest import TRANSFORMER, Assets, Done
from tests.distributed import metrics, run_jobs
from tests.test_errors import one_line


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


def test_lines_of_several_steps(assets: Assets, tmp_path: Path, run_main: Callable[..., Done]) -> None:
    """Means of what a line for each step says, in DeepSpeed's CSV files as well; the rest of the steps has a line too."""
    common = {"deepspeed_config": assets.ds_config(0), "max_train_steps": 5}
    every = assets.flags(tmp_path / "every", **common)
    some = assets.flags(tmp_path / "some", **common, logging_steps=3, report_to="csv,tensorboard", peak_tflops=0.5)
    assert run_main("train", *every).status == 0 and run_main("train", *some).status == 0
    steps, lines = metrics(tmp_path / "every"), metrics(tmp_path / "some")
    assert [line["step"] for line in lines] == [3, 5]
    for line, part in zip(lines, (steps[:3], steps[3:])):
        for name in ("loss", "grad_norm"):
            assert line[name] == pytest.approx(sum(step[name] for step in part) / len(part), rel=1e-6)
        assert line["num_images"] == sum(step["num_images"] for step in part) and line["lr"] == part[-1]["lr"]
        num_bins = {name: sum(name in step for step in part) for name in line if name.startswith("loss_by_sigma/")}
        assert len(num_bins) >= 2 and all(num_bins.values())
        assert line["mfu"] == pytest.approx(line["model_tflops_per_s"] / 0.5)
        parts = ("data_wait", "text_engine", "autoencoder", "forward", "backward", "optimizer")
        assert 0 < sum(line[f"time_s/{name}"] for name in parts) <= line["time_s/step"]
    rows = [row.split(",") for row in (tmp_path / "some/logs/csv/loss.csv").read_text().split()]
    assert [(int(step), float(loss)) for step, loss in rows[1:]] == [(line["step"], line["loss"]) for line in lines]


@pytest.mark.parametrize("rank", [None, 4])
def test_model_flops_are_those_of_a_real_pass(assets: Assets, rank: int | None) -> None:
    """Counted on the CPU, where attention is two products and their four derivatives; fused kernels take one product more."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    from ds_flux import models
    from ds_flux.denoiser import denoising_loss
    from ds_flux.flops import ModelFlops, num_tokens
    from ds_flux.latents import Batch
    from ds_flux.sections import LoraConfig, ModelConfig

    model, adapters = ModelConfig(pretrained_model_name_or_path=str(assets.model), mixed_precision="no"), LoraConfig(rank=rank)
    architecture = models.find_architecture(model)
    transformer = models.build_transformer(architecture, model, adapters, 0, None)
    text = torch.randn(2, 8, TRANSFORMER["joint_attention_dim"]), torch.randn(2, TRANSFORMER["pooled_projection_dim"])
    names = [spec.argument for spec in architecture.family.text_encoders]
    features = dict(zip(names, text if names[0] == "encoder_hidden_states" else text[::-1]))
    batch = Batch(torch.randn(2, TRANSFORMER["in_channels"], 2, 6), features)
    sigma = torch.rand(2)
    extra = {"guidance": sigma} if architecture.has_guidance else {}
    counter = FlopCounterMode(display=False)
    with sdpa_kernel(SDPBackend.MATH), counter:
        denoising_loss(transformer, architecture.family, batch, sigma, torch.randn_like(batch.latents), extra).mean().backward()
    width = TRANSFORMER["num_attention_heads"] * TRANSFORMER["attention_head_dim"]
    num_blocks = TRANSFORMER["num_layers"] + TRANSFORMER["num_single_layers"]
    assert num_tokens(batch) == 2 * 20
    again = num_blocks * 2 * 2 * 20**2 * width
    assert ModelFlops.of_model(architecture, model, adapters).of(batch) == counter.get_total_flops() + again


def test_waiting_for_others_is_counted(tmp_path: Path) -> None:
    """The rank that comes first waits, in a collective and in one that it has started; then DeepSpeed is as it was."""
    run_jobs(2, [{"function": "tests.workers:wait_for_a_late_rank", "args": [str(tmp_path)]}], tmp_path)
    first, late = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first["at_once"] > 0.4 and first["started"] > 0.4
    assert late["at_once"] < 0.3 and late["started"] < 0.3
    assert first["is_as_before"] and late["is_as_before"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--report_to", "wandb,paper"], "--report_to wandb needs a package: pip install wandb"),
        (["--report_to", "paper"], "--report_to paper: expected tensorboard, csv, wandb, comet"),
        (["--logging_steps", "0"], "--logging_steps 0 must be 1 or more"),
        (["--peak_tflops", "0"], "--peak_tflops must be more than 0"),
    ],
)
def test_bad_flags(flags: list[str], said: str, assets: Assets, tmp_path: Path, run_main: Callable[..., Done]) -> None:
    done = run_main("train", *assets.flags(tmp_path / "run"), *flags)
    one_line(done, said)
