"""What the ranks of test_foreign do: train with plain DeepSpeed and save as it, and accelerate, would."""

from pathlib import Path

import deepspeed
import torch
from diffusers import FluxTransformer2DModel
from torch import nn

from tests.workers import fixed_inputs

KINDS = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1, "freeze": True},
    "stage 2": {"stage": 2, "bf16": True, "wrap": True},
    "stage 3": {"stage": 3, "freeze": True},
}
FROZEN = "proj_out"


class Holder(nn.Module):
    """A transformer among other things, as some scripts hold it."""

    def __init__(self, transformer: FluxTransformer2DModel):
        super().__init__()
        self.transformer = transformer
        self.text_encoder = nn.Linear(4, 4)


def train_and_save(model: str, folder: str) -> None:
    """A checkpoint of each kind at steps 1 and 2; of step 2 at stage 3 once more, as accelerate names it."""
    for name, kind in KINDS.items():
        path = Path(folder) / name
        engine = initialize(model, **kind)
        for step in (1, 2):
            inputs = fixed_inputs(next(engine.module.parameters()).dtype)
            forward = engine.module.transformer if kind.get("wrap") else engine
            loss = forward(**inputs, return_dict=False)[0].float().square().mean()
            if kind.get("wrap"):
                loss = loss + engine.module.text_encoder.weight.float().square().sum()
            engine.backward(loss)
            engine.step()
            engine.save_checkpoint(str(path), client_state={"epoch": step})
            if step == 2 and kind["stage"] == 3:
                engine.save_checkpoint(str(Path(folder) / "accelerate/checkpoint-2"), tag="pytorch_model")
        engine.destroy()


def initialize(
    model: str, stage: int, freeze: bool = False, bf16: bool = False, wrap: bool = False
) -> deepspeed.DeepSpeedEngine:
    """An engine around the small transformer, with torch's own optimizer."""
    module: nn.Module = FluxTransformer2DModel.from_pretrained(Path(model) / "transformer")
    if freeze:
        module.get_submodule(FROZEN).requires_grad_(False)
    module = Holder(module) if wrap else module
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    # two groups, as where biases do not decay
    groups = [{"params": parameters[:5], "weight_decay": 0.0}, {"params": parameters[5:]}]
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": bf16},
        "zero_optimization": {"stage": stage, **({"stage3_param_persistence_threshold": 0} if stage == 3 else {})},
    }
    return deepspeed.initialize(model=module, optimizer=torch.optim.AdamW(groups, lr=1e-2), config=config)[0]
