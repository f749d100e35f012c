"""CPU time per step, CPU time to the first step and peak memory of a rank, beside a bare DeepSpeed loop on the same model.

    python -m tests.benchmarks.train_loop [--repeats 3] [--steps 8] [--folder out/benchmarks]

Two gloo ranks of one thread, bf16, ZeRO-3, torch's fused AdamW, 256 image and 64 text tokens, batch 2 per rank.  The bare
loop is what a careful user writes by hand: `from_pretrained`, `deepspeed.initialize`, ready-made tensors, no logging.  Ours
is `ds-flux train` as it is: decoding, encoding (T5 in its engine, autoencoder), metrics and checks included.  Both kinds
alternate, so that a noisy neighbour meets both; what counts is process CPU time, and the operating system's peak.
"""

import argparse
import json
import resource
import statistics
import time
from pathlib import Path
from typing import Any

from tests.benchmarks import assets
from tests.distributed import launch


def measure(clock: list[float], out: str) -> None:
    """Write what a rank used: CPU seconds to the end of the first step, of each later step, and the peak in GiB."""
    from ds_flux import runtime

    figures = {
        "first_step_s": clock[0],
        "step_s": [after - before for before, after in zip(clock, clock[1:])],
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }
    Path(f"{out}-{runtime.rank()}.json").write_text(json.dumps(figures))


def ours(folder: str, num_steps: int, out: str, *more: str) -> None:
    """One rank of `ds-flux train` with `more` flags, its steps clocked from outside."""
    from ds_flux import checkpoint, commands, config, trainer

    argv = [*assets.flags(Path(folder), Path(f"{out}-run"), num_steps), *more]
    settings, _ = config.load(argv, "ds-flux train", commands.TrainCommand)
    clock: list[float] = []
    step = trainer.train_step

    def clocked_step(*args: Any) -> dict[str, float]:
        figures = step(*args)
        clock.append(time.process_time())
        return figures

    trainer.train_step = clocked_step
    checkpoint.Saver.save = lambda *_, **__: None  # the bare loop saves nothing
    trainer.train(settings)
    measure(clock, out)


def bare(folder: str, num_steps: int, out: str) -> None:
    """One rank of the loop by hand."""
    import deepspeed
    import torch
    from diffusers import FluxTransformer2DModel

    deepspeed.init_distributed(verbose=False)
    transformer = FluxTransformer2DModel.from_pretrained(f"{folder}/model/transformer", torch_dtype=torch.bfloat16).train()
    ds_config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True, "fused": True}},
        "steps_per_print": 10**9,
    }
    engine, *_ = deepspeed.initialize(model=transformer, model_parameters=transformer.parameters(), config=ds_config)
    bf16 = {"dtype": torch.bfloat16}
    latents = torch.randn(2, assets.NUM_IMAGE_TOKENS, 64)
    text = torch.randn(2, assets.NUM_TEXT_TOKENS, assets.TRANSFORMER["joint_attention_dim"], **bf16)
    pooled = torch.randn(2, assets.TRANSFORMER["pooled_projection_dim"], **bf16)
    img_ids, txt_ids = torch.zeros(assets.NUM_IMAGE_TOKENS, 3), torch.zeros(assets.NUM_TEXT_TOKENS, 3)
    clock = []
    for _ in range(num_steps):
        sigma, noise = torch.rand(2), torch.randn_like(latents)
        noisy = (1 - sigma.view(-1, 1, 1)) * latents + sigma.view(-1, 1, 1) * noise
        velocity = engine(
            hidden_states=noisy.bfloat16(), encoder_hidden_states=text, pooled_projections=pooled, timestep=sigma,
            guidance=torch.full((2,), 3.5), img_ids=img_ids, txt_ids=txt_ids, return_dict=False,
        )[0]  # fmt: skip
        loss = (velocity.float() - (noise - latents)).square().mean()
        engine.backward(loss)
        engine.step()
        clock.append(time.process_time())
    measure(clock, out)


def worst_rank(out: Path) -> dict[str, float]:
    """The figures of the rank that used most; a step's is its best, the most repeatable figure on a shared machine."""
    ranks = [json.loads(Path(f"{out}-{rank}.json").read_text()) for rank in range(2)]
    return {
        "step_s": max(min(rank["step_s"]) for rank in ranks),
        "first_step_s": max(rank["first_step_s"] for rank in ranks),
        "peak_gib": max(rank["peak_gib"] for rank in ranks),
    }


def main() -> None:
    """Alternate both kinds, print every run and the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--folder", type=Path, default=Path("out/benchmarks"))
    options = parser.parse_args()
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    assets.write(folder)
    results: dict[str, list[dict[str, float]]] = {"bare": [], "ours": []}
    for repeat in range(options.repeats):
        for kind, rows in results.items():
            out = folder / f"{kind}-{time.time_ns()}"
            done = launch(
                2, "tests.benchmarks.train_loop", "rank", kind, str(folder), str(options.steps), str(out), timeout_s=900
            )
            assert done.returncode == 0, done.stderr[-3000:]
            rows.append(worst_rank(out))
            print(f"{repeat} {kind:5}", {key: round(value, 2) for key, value in rows[-1].items()}, flush=True)
    for key in ("step_s", "first_step_s", "peak_gib"):
        best = {kind: min(row[key] for row in rows) for kind, rows in results.items()}
        pairs = [ours[key] / bare[key] for ours, bare in zip(results["ours"], results["bare"])]
        print(
            f"{key:13} best: bare {best['bare']:.2f}, ours {best['ours']:.2f}, ratio {best['ours'] / best['bare']:.3f}; "
            f"median of pairs {statistics.median(pairs):.3f}"
        )


if __name__ == "__main__":
    import sys

    words = [word for word in sys.argv[1:] if not word.startswith("--local_rank")]
    if words[:1] == ["rank"]:
        {"ours": ours, "bare": bare}[words[1]](words[2], int(words[3]), *words[4:])
    else:
        main()
