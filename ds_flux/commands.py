"""The flags that one command has of its own, beside those of a run."""

from dataclasses import dataclass
from typing import Literal


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
class PlanCommand:
    """this command"""

    num_gpus: int | None = None
    """GPUs of each node"""
    gpu_memory_gib: float | None = None
    """memory of each GPU"""
    nodes: int = 1
    """number of nodes"""
    host_memory_gib: float | None = None
    """host memory of each node; default: not looked at"""
    nvme_gib: float = 0.0
    """disk for NVMe offload on each node"""
    reserve_gib: float = 2.0
    """of each GPU's memory, for its driver, NCCL and fragments: not for tensors"""
    ds_configs: str = "ds_configs"
    """folder of the DeepSpeed configs to look at, beside the run's own"""
    json: bool = False
    """as JSON, in bytes"""


@dataclass(frozen=True, kw_only=True)
class TuneCommand:
    """this command"""

    num_gpus: int | None = None
    """processes on each node"""
    nodes: int = 1
    """number of nodes"""
    hostfile: str | None = None
    """DeepSpeed's hostfile, for several nodes"""
    memory_gib: float | None = None
    """what a process may take, on its accelerator or, without one, in host memory; a trial that takes more does not count"""
    ds_configs: str = "ds_configs"
    """folder of the DeepSpeed configs to try"""
    trials: int = 14
    """trials of the search at most"""
    refinements: int = 4
    """further trials at most, of the best with other sizes of buckets"""
    steps: int = 4
    """optimizer steps of the first trials; later ones take twice as many, and so on"""
    trial_limit_s: int = 1200
    """a trial that is not done by then is ended, and counts as one that does not work"""
    folder: str | None = None
    """where trials and results are; a second start goes on there.  Default: tune in the run's folder"""


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


@dataclass(frozen=True, kw_only=True)
class EvaluateCommand:
    """this command"""

    transformer: str | None = None
    """folder of a consolidated transformer; default: the base model's"""
    lora: str | None = None
    """LoRA file, or its folder"""
    checkpoint: str | None = None
    """instead: a checkpoint, or a run: then its latest one; of all weights, or of a LoRA"""
    weights: Literal["trained", "ema"] = "trained"
    """of the checkpoint: those that were trained, or their moving average that --ema_decay kept"""
    prompts: str | list[str] | None = None
    """.txt file with one prompt on each line, or a list; default: the captions of the validation set"""
    num_images_per_prompt: int = 1
    """images of each prompt, each from noise of its own"""
    height: int | None = None
    """pixels; default: --resolution"""
    width: int | None = None
    """pixels; default: the same"""
    num_inference_steps: int = 28
    """steps of the sampler"""
    sample_guidance_scale: float | None = None
    """distilled guidance for models with an embedding for it, else classifier-free guidance; default: the pipeline's"""
    clip_model: str | None = None
    """measure the CLIP score by this model: a folder, or a hub id such as openai/clip-vit-large-patch14"""
    fid_weights: str | None = None
    """measure FID by Inception with the weights of this file, pt_inception-2015-12-05-6726825d.pth; it is never fetched"""
    fid_dataset: str | None = None
    """FID compares with these images: a folder of them, or a data set as the run reads its own; scaled and cropped as there"""
    fid_statistics: str | None = None
    """instead: with what --save_fid_statistics wrote of them"""
    save_fid_statistics: str | None = None
    """keep what FID needs to know of --fid_dataset in this file"""
    evaluate_dir: str | None = None
    """folder for the results and images; default: evaluation here, or of a checkpoint in its run's folder"""
