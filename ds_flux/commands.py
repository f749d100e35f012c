"""The flags that one command has of its own, beside those of a run."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TrainCommand:
    """this command"""

    dry_run: bool = False
    """print the resolved settings, the final DeepSpeed configs and what would train, and exit"""


@dataclass(frozen=True, kw_only=True)
class PrecomputeCommand:
    """this command"""


@dataclass(frozen=True, kw_only=True)
class DoctorCommand:
    """this command"""

    data: bool = False
    """decode every image and read every caption, as training would, and look at nothing else"""
    hostfile: str | None = None
    """look at every node of it, as a run would start there; default: at this machine alone"""
    master_port: int = 29500
    """where rank 0 will listen"""
    ssh_port: int | None = None
    """of the nodes; default: what ssh's settings say"""


@dataclass(frozen=True, kw_only=True)
class SampleCommand:
    """this command"""

    prompt: str | list[str] = ""
    """what to show; several as a list: '["a cat", "a dog"]'"""
    image: str | list[str] | None = None
    """reference image to edit; several: a,b or a list"""
    num_images_per_prompt: int = 1
    """images of each prompt, each from noise of its own"""
    transformer: str | None = None
    """folder of a consolidated transformer; default: the base model's"""
    lora: str | None = None
    """LoRA file, or its folder"""
    height: int | None = None
    """pixels; default: --resolution, or with --image the size of the first"""
    width: int | None = None
    """pixels; default: the same"""
    num_inference_steps: int = 28
    """steps of the sampler"""
    sample_guidance_scale: float | None = None
    """distilled guidance for models with an embedding for it, else classifier-free guidance; default: the pipeline's"""
    sample_dir: str = "samples"
    """folder for the images, one PNG each"""
