"""Plain functions that `tests.distributed` runs on every rank."""

from pathlib import Path
from typing import Any

import torch


def fixed_inputs(dtype: torch.dtype = torch.float32, batch_size: int = 2) -> dict[str, torch.Tensor]:
    """Arguments of the small transformer, the same everywhere."""
    from ds_flux.families.flux1 import FLUX1
    from ds_flux.latents import image_ids, text_ids

    generator = torch.Generator().manual_seed(5)
    return {
        "hidden_states": torch.randn(batch_size, 16, 16, generator=generator).to(dtype),
        "encoder_hidden_states": torch.randn(batch_size, 8, 32, generator=generator).to(dtype),
        "pooled_projections": torch.randn(batch_size, 32, generator=generator).to(dtype),
        "timestep": torch.tensor([0.3, 0.8])[:batch_size],
        "guidance": torch.full((batch_size,), 3.5),
        "img_ids": image_ids(4, 4, FLUX1.positions),
        "txt_ids": text_ids(8, FLUX1.positions),
    }


def velocity_of_run(argv: list[str], path: str) -> None:
    """What the engine of a resumed run says for the fixed inputs, saved by rank 0."""
    from ds_flux import commands, config, runtime
    from ds_flux.run import setup

    run = setup(config.load(argv, "ds-flux train", commands.TrainCommand)[0])
    run.engine.eval()  # no dropout of adapters
    with torch.no_grad():
        velocity = run.engine(**fixed_inputs(next(run.engine.module.parameters()).dtype), return_dict=False)[0]
    assert run.first_step == run.last_step
    if runtime.rank() == 0:
        torch.save(velocity, path)


def text_engine_equals_whole(model: str, ds_config: str, path: str) -> None:
    """T5 in its engine and T5 whole say the same, bit for bit; rank 0 saves the largest difference."""
    from transformers import T5EncoderModel

    from ds_flux import commands, config, models, runtime
    from ds_flux.assemble import build_conditioner

    argv = ["--pretrained_model_name_or_path", model, "--mixed_precision", "no", "--max_sequence_length", "8"]
    settings = config.load([*argv, "--text_encoder_deepspeed_config", ds_config], "test", commands.TrainCommand)[0]
    conditioner = build_conditioner(settings, models.find_architecture(settings.model))
    engine = conditioner.encoders["text_encoder_2"]
    held = sum(parameter.ds_tensor.numel() for parameter in engine.module.parameters())
    whole = T5EncoderModel.from_pretrained(Path(model) / "text_encoder_2").eval()
    total = sum(parameter.numel() for parameter in whole.parameters())
    assert all(parameter.numel() == 0 for parameter in engine.module.parameters())
    assert held < total * 0.51, (held, total)
    clip = conditioner.encoders["text_encoder"]
    assert all(parameter.numel() > 0 for parameter in clip.parameters()), "CLIP is replicated"
    ids = torch.randint(3, 20, (3, 8), generator=torch.Generator().manual_seed(runtime.rank()))
    with torch.no_grad():
        difference = (engine(input_ids=ids)[0] - whole(input_ids=ids)[0]).abs().max()
    worst = runtime.all_reduce_max(difference.reshape(1))
    if runtime.rank() == 0:
        torch.save(worst, path)


def partitioned_weights_equal_file(folder: str, ds_config: dict[str, Any]) -> None:
    """Every parameter, gathered, equals the file; no rank ever held more than its slice."""
    import deepspeed
    from diffusers import FluxTransformer2DModel

    from ds_flux import runtime
    from ds_flux.zero.weights import SafetensorsFolder, fill_module

    with torch.device("meta"):
        module = FluxTransformer2DModel.from_config(FluxTransformer2DModel.load_config(folder))
    fill_module(module, SafetensorsFolder(Path(folder), "diffusion_pytorch_model"), torch.float32, ds_config)
    whole = FluxTransformer2DModel.from_pretrained(folder).state_dict()
    for name, parameter in module.named_parameters():
        assert parameter.numel() == 0
        assert parameter.ds_tensor.numel() == -(-whole[name].numel() // runtime.world_size())
        with deepspeed.zero.GatheredParameters([parameter]):
            assert torch.equal(parameter.data, whole[name]), name


def ranks_fail_together() -> None:
    """What fails on one rank fails on all with the same words; what fails on none goes on.  No shared memory keeps a name."""
    import os

    import pytest

    from ds_flux import UserError, runtime

    assert not list(Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{os.environ['MASTER_PORT']}_*"))

    with runtime.together("nothing"):
        pass
    with pytest.raises(UserError, match="^bad image$"), runtime.together("reading"):
        if runtime.rank() == 1:
            raise UserError("bad image")
    with pytest.raises(RuntimeError, match="reading failed on rank 1: disk"), runtime.together("reading"):
        if runtime.rank() == 1:
            raise OSError("disk")
    with pytest.raises(UserError, match="^not there$"):
        runtime.on_main(lambda: (_ for _ in ()).throw(UserError("not there")), "looking")
    assert runtime.on_main(lambda: "found", "looking") == "found"
    assert runtime.any_rank(runtime.rank() == 1) and not runtime.any_rank(False)
    first = runtime.on_each_node_first(runtime.rank, "counting")
    assert first == runtime.rank()


def encode_prompts(argv: list[str], prompts: list[str], path: str) -> None:
    """The text features of each prompt alone, by the sharded engine; the ranks take different prompts first."""
    from ds_flux import assemble, commands, config, models, runtime

    settings = config.load(argv, "test", commands.TrainCommand)[0]
    conditioner = assemble.build_conditioner(settings, models.find_architecture(settings.model))
    shift = runtime.rank()
    turned = prompts[shift:] + prompts[:shift]
    texts = [conditioner.encode_text({encoder: [prompt] for encoder in conditioner.encoders}) for prompt in turned]
    engine = conditioner.encoders[conditioner.family.large_encoder.component]
    assert all(parameter.numel() == 0 for parameter in engine.module.parameters()), "not sharded"
    torch.save(texts[-shift:] + texts[:-shift] if shift else texts, f"{path}.{shift}")
    runtime.barrier()
    if runtime.rank() == 0:
        one, other = torch.load(f"{path}.0"), torch.load(f"{path}.1")
        for a, b in zip(one, other):
            assert all(torch.equal(a[name], b[name]) for name in a)
        torch.save(one, path)


def sample(argv: list[str]) -> None:
    """`ds-flux sample` in the group that is there."""
    from ds_flux import commands, config, sampler

    sampler.sample(*config.load(argv, "test", commands.SampleCommand))


def evaluate(argv: list[str]) -> None:
    """`ds-flux evaluate` in the group that is there."""
    from ds_flux import commands, config, evaluate

    evaluate.evaluate(*config.load(argv, "test", commands.EvaluateCommand))


def train_and_look(argv: list[str], look_at: str, stop_after: int) -> None:
    """Train, and write to looks.jsonl what is in a folder after each step; one rank gets SIGTERM after step `stop_after`."""
    import json
    import os
    import signal

    from ds_flux import commands, config, metrics, runtime, trainer
    from ds_flux.mlperf import MlperfLog
    from ds_flux.requests import Requests
    from ds_flux.run import setup

    settings = config.load(argv, "ds-flux train", commands.TrainCommand)[0]
    output_dir = Path(settings.run.output_dir)

    class Looking(metrics.MetricsWriter):
        def write(self, step: int, figures: dict[str, float]) -> None:
            super().write(step, figures)
            if runtime.rank() == 0:
                found = {str(path.relative_to(look_at)): path.stat().st_size for path in Path(look_at).rglob("*.*")}
                with (output_dir / "looks.jsonl").open("a") as file:
                    file.write(json.dumps(found) + "\n")
            if step == stop_after and runtime.rank() == runtime.world_size() - 1:
                os.kill(os.getpid(), signal.SIGTERM)

    run = setup(settings)
    writer = Looking(output_dir, run.first_step, run.last_step, runtime.rank() == 0, MlperfLog(None, 0))
    with Requests(output_dir) as requests:
        trainer.loop(run, trainer.make_saver(run), writer, requests)
    writer.close()
    runtime.barrier()


def precompute_in_small_shards(argv: list[str], shard_bytes: int) -> None:
    """`ds-flux precompute` that completes a shard every few records."""
    from functools import partialmethod

    from ds_flux import commands, config, precompute
    from ds_flux.data.store import Store

    Store.writer = partialmethod(Store.writer, shard_bytes=shard_bytes)
    precompute.precompute(config.load(argv, "test", commands.PrecomputeCommand)[0])


def poison(argv: list[str], samples: list[int]) -> None:
    """Newer records of samples in a run's cache, with the fingerprints that they must have, which are not finite."""
    from ds_flux import assemble, caching, commands, config, inputs
    from ds_flux.data.cache import LatentCache
    from ds_flux.data.store import Store

    settings = config.load(argv, "test", commands.TrainCommand)[0]
    data = inputs.look_at_data(settings, assemble.find_model(settings))
    pictures = caching.pictures_of(settings, data.samples)
    cache = LatentCache(Store(caching.latents_folder(settings, pictures)))
    with cache.store.writer("poison") as writer:
        for key in [(sample, 0) for sample in samples]:
            nan = torch.full_like(cache.read(key)[0][0], torch.nan)
            cache.write(writer, key, pictures.fingerprint(key), [nan], None, None)


def fails_alone(argv: list[str], kind: str) -> None:
    """`ds-flux train`, in whose second step the last rank fails; or in its first image."""
    import os
    import sys

    from ds_flux import __main__ as command_line
    from ds_flux.objective import Objective
    from ds_flux.sampling import Sampler

    calls, loss, image = [], Objective.loss, Sampler.image

    def failing(self: Any, *arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 2 and os.environ["RANK"] != "0":
            if kind == "memory":
                torch.empty(1 << 50)
            raise ZeroDivisionError("a fault of the program")
        return loss(self, *arguments)

    def failing_image(self: Any, *arguments: Any) -> Any:
        if os.environ["RANK"] != "0":
            raise ZeroDivisionError("a fault of the pipeline")
        return image(self, *arguments)

    if kind == "image":
        Sampler.image = failing_image
    else:
        Objective.loss = failing
    sys.argv = ["ds-flux", "train", *argv]
    command_line.run()


def engines_take_what_is_planned(jobs: list[list[str]]) -> None:
    """Bytes of a real engine's own tensors after a step, against the plan's; every rank looks at its own."""
    from ds_flux import commands, config, outline
    from ds_flux.plan import Planner, Setting
    from ds_flux.planned import machine_here
    from ds_flux.run import setup
    from ds_flux.zero.memory import MODULE_BYTES

    for argv in jobs:
        settings = config.load(argv, "test", commands.TrainCommand)[0]
        planned = Planner(settings, outline.draw(settings), machine_here()).row(Setting.of(settings)).transformer
        engine = setup(settings).engine
        hooks = MODULE_BYTES * len(list(engine.module.modules())) if engine.zero_optimization_stage() == 3 else 0
        dtype = next(engine.module.parameters()).dtype
        velocity = engine(**fixed_inputs(dtype), return_dict=False)[0]
        engine.backward(velocity.float().square().mean())
        engine.step()
        found = tensors_of(engine)
        if "offload_optimizer" in engine.config["zero_optimization"]:
            expected = {"weights": planned.weights, "host": planned.host - hooks}
        else:
            expected = {"weights": planned.weights, "optimizer": planned.optimizer}
            expected |= {"gradients": planned.gradients} if engine.zero_optimization_stage() == 3 else {}
        assert {name: found[name] for name in expected} == expected, (found, planned, settings.zero, settings.lora)
        engine.destroy()


def tensors_of(engine: Any) -> dict[str, int]:
    """Bytes of the tensors that an engine keeps on this rank."""
    optimizer, moments = engine.optimizer, 0
    for state in optimizer.optimizer.state.values():
        moments += sum(value.nbytes for value in state.values() if torch.is_tensor(value) and value.numel() > 1)
    parameters = list(engine.module.parameters())
    if engine.zero_optimization_stage() < 3:
        masters, flats = optimizer.single_partition_of_fp32_groups, optimizer.bit16_groups_flat
        frozen = sum(parameter.nbytes for parameter in parameters if not parameter.requires_grad)
        found = {"weights": sum(flat.nbytes for flat in flats) + frozen, "gradients": 0}
        if optimizer.cpu_offload:
            copies = [*optimizer.param_buffer_of_bit16_for_cpu_offload_groups, optimizer.temp_grad_buffer_for_cpu_offload]
            found["host"] = sum(tensor.nbytes for tensor in (*masters, *(m.grad for m in masters), *copies)) + moments
    else:
        masters, gradients = optimizer.fp32_partitioned_groups_flat, optimizer.grad_partitions_flat_buffer.nbytes
        whole = sum(parameter.nbytes for parameter in parameters)
        partitions = sum(parameter.ds_tensor.nbytes for parameter in parameters)
        in_host = partitions if optimizer.offload_param else 0
        found = {"weights": whole + partitions - in_host, "gradients": gradients}
        if optimizer.offload_optimizer:
            found["host"] = in_host + gradients + sum(2 * master.nbytes for master in masters) + moments
    owned = {tensor.data_ptr() for tensor in masters} - {p.ds_tensor.data_ptr() for p in parameters if hasattr(p, "ds_tensor")}
    return {**found, "optimizer": sum(m.nbytes for m in masters if m.data_ptr() in owned) + moments}


def wait_for_a_late_rank(folder: str) -> None:
    """Write what a rank waits in collectives to which rank 1 comes half a second late."""
    import json
    import time

    import torch
    from deepspeed.comm import comm

    from ds_flux import runtime
    from ds_flux.clock import Clock
    from ds_flux.zero import waits

    clock, before, waited = Clock(), comm.cdb.all_reduce, {}
    with waits.clocked(clock):
        for name, is_async in (("at_once", False), ("started", True)):
            comm.barrier()
            clock.read()
            if runtime.rank() == 1:
                time.sleep(0.5)
            work = comm.all_reduce(torch.ones(3), async_op=is_async)
            if work is not None and is_async:
                work.wait()
            waited[name] = clock.read()[waits.PART]
    waited["is_as_before"] = comm.cdb.all_reduce == before
    Path(f"{folder}/{runtime.rank()}.json").write_text(json.dumps(waited))
