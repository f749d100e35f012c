"""Every setting of a training run, in sections: one frozen dataclass for one consumer."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """run"""

    output_dir: str = "out"
    """folder for checkpoints, logs and the resolved settings"""
    seed: int = 0
    """decides, with a sample's identity, everything random about it; and the order of the data"""
    timeout_s: int = 1800
    """a process that does not answer for so long ends the run"""
    skip_final_inference: bool = False
    """make no images of --validation_prompt after the last step"""
    verbose: bool = False
    """show all that DeepSpeed and the other libraries say of themselves, and not only their warnings"""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """model"""

    pretrained_model_name_or_path: str | None = None
    """diffusers-layout folder or hub id; every component comes from here unless it is replaced below"""
    revision: str | None = None
    """branch, tag or commit of the hub id"""
    variant: str | None = None
    """file name variant of the weights, e.g. bf16"""
    transformer_path: str | None = None
    """another folder for the transformer, e.g. one that `ds-flux consolidate` wrote"""
    vae_path: str | None = None
    """another folder for the autoencoder"""
    text_encoder_path: str | None = None
    """another folder for the first text encoder (CLIP for FLUX.1)"""
    text_encoder_2_path: str | None = None
    """another folder for the second text encoder (T5 for FLUX.1)"""
    tokenizer_path: str | None = None
    """another folder for the first tokenizer"""
    tokenizer_2_path: str | None = None
    """another folder for the second tokenizer"""
    scheduler_path: str | None = None
    """another folder for the sampling scheduler"""
    from_scratch: bool = False
    """do not read transformer weights: initialise them from the seed (pre-training)"""
    transformer_config: str | None = None
    """with --from_scratch: a flavour (debug, dev, schnell) or the path of a config.json; default: the model folder's own"""
    mixed_precision: Literal["no", "bf16"] = "bf16"
    """bf16: bf16 weights with fp32 masters in the optimizer; no: fp32 throughout"""
    gradient_checkpointing: bool = False
    """recompute each block's activations in the backward pass: less memory, about a third more computation"""
    gradient_checkpointing_every: int = 1
    """recompute only every n-th block, where there is memory for the others' activations"""
    offload_activations: bool = False
    """keep what each block is recomputed from in CPU memory"""
    compile: bool = False
    """compile each block with torch.compile; ZeRO-3 then gathers whole blocks"""
    shard_text_encoder: bool = True
    """keep the large text encoder in a ZeRO-3 engine of its own; off: whole on every rank"""
    max_sequence_length: int | None = None
    """text tokens; default: what the checkpoint was made for"""
    attention_backend: str | None = None
    """how attention is computed, by diffusers' names (native, flash, _native_npu, ...); default: diffusers' own choice"""
    offload: bool = False
    """keep frozen models in CPU memory between uses"""


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """LoRA"""

    rank: int | None = None
    """train a LoRA of this rank; default: train all weights"""
    lora_alpha: float | None = None
    """scale is lora_alpha / rank; default: the rank"""
    lora_dropout: float = 0.0
    """dropout in front of the adapters"""
    lora_layers: str | list[str] | None = None
    """layers to adapt: ends of their names, or patterns such as transformer_blocks.*.attn.*; default: the family's"""
    lora_init_from: str | None = None
    """start from this LoRA file, or its folder; as diffusers, kohya or ComfyUI write it"""

    @property
    def alpha(self) -> float:
        """--lora_alpha, or its default; only where there is a rank."""
        return float(self.rank if self.lora_alpha is None else self.lora_alpha)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """data"""

    dataset_name: str | list[str] | None = None
    """hub id or local path, for the `datasets` library; several data sets: a,b or a list"""
    data_files: str | list[str] | None = None
    """files for the `datasets` library instead: webdataset (.tar), .parquet, .json, .jsonl or .csv; with * for several"""
    dataset_config_name: str | None = None
    """which configuration of the data set"""
    dataset_weights: list[float] | None = None
    """[3, 1]: three of four samples come from the first of two data sets; default: each sample comes once in an epoch"""
    streaming: bool = False
    """read --dataset_name or --data_files from front to back, shard by shard, and not into a copy on this disk"""
    shuffle_buffer: int = 1000
    """--streaming: samples that are shuffled together; processes share them"""
    image_column: str = "image"
    """column with the images"""
    cond_image_column: str | list[str] | None = None
    """column with the reference image of each row, for editing; several: a,b or a list.  A row may have fewer"""
    reference_max_pixels: int = 1024 * 1024
    """a reference with more pixels is scaled down to this many; its shape stays its own.  The pipelines do the same at this
    default, but one for a single reference that they keep whole: they allow four times as many"""
    reference_dropout: float = 0.0
    """share of samples that are trained without their references"""
    augment_references: bool = False
    """crop and flip references exactly as the image; off: they stay whole"""
    caption_column: str | None = None
    """column with the captions, one or a list of several for each image; default: --instance_prompt for every image"""
    instance_data_dir: str | list[str] | None = None
    """folder of images (several: a,b or a list), each with its caption in a .txt or .caption file of the same name, or
    --instance_prompt.  A file of several lines has several captions: one is drawn for each visit"""
    instance_prompt: str | None = None
    """caption of every image that has none of its own"""
    caption_prefix: str = ""
    """put in front of every caption, with a space between"""
    trigger_word: str | None = None
    """put in front of every caption that has it not yet, with a comma between; the prefix comes before it"""
    shuffle_tags: bool = False
    """captions are comma-separated tags: put them in another order for each visit"""
    keep_tags: int = 0
    """how many first tags of a caption stay where they are"""
    alpha_background: str = "white"
    """what shows through transparent images: the name of a colour, or #rrggbb"""
    max_image_pixels: int = 178956970
    """an image with more pixels is not decoded: it counts as one that cannot be read"""
    resolution: int | list[int] = 512
    """images are scaled and cropped to this many pixels square, a multiple of 16; of several, [512, 768], each visit of a
    sample draws one that the image is large enough for"""
    use_aspect_ratio_buckets: bool = False
    """scale and crop to the nearest of eleven shapes between 1:2 and 2:1, each at most as large as the square"""
    aspect_ratio_buckets: str | None = None
    """the shapes themselves: height,width;height,width;..."""
    center_crop: bool = False
    """crop the centre; off: a random place"""
    random_flip: bool = False
    """flip half of the images left to right"""
    proportion_empty_prompts: float = 0.0
    """share of samples whose prompt is emptied for all text encoders at once"""
    text_encoder_dropout: float = 0.0
    """share of samples whose prompt is emptied for the first text encoder, independently of the second (pre-training)"""
    text_encoder_2_dropout: float = 0.0
    """the same for the second text encoder"""
    on_bad_sample: Literal["skip", "error"] = "skip"
    """an image or caption that cannot be used: leave its sample out and list it in skipped.jsonl, or stop"""
    max_bad_fraction: float = 0.05
    """share of the data that may be left out; beyond it the run stops"""
    vae_encode_mode: Literal["mode", "sample"] = "mode"
    """latents of images are the autoencoder's mean, or drawn anew for each visit from what it says; references: the mean"""
    cache_latents: bool = False
    """encode every image once, before the first step, and let the autoencoder go"""
    cache_text: bool = False
    """encode every distinct prompt once, before the first step, and let the text encoders go"""
    cache_dir: str | None = None
    """where encoded images and prompts are kept, and found again by later runs; default: cache in the run's folder"""
    precomputation_items: int | None = None
    """with these caches: encode what so many samples need, train on them, forget them; default: all before the first step"""
    dataloader_num_workers: int = 0
    """processes that decode images; 0: the training process itself"""

    @property
    def resolutions(self) -> list[int]:
        """One or several."""
        return self.resolution if isinstance(self.resolution, list) else [self.resolution]


@dataclass(frozen=True, kw_only=True)
class FlowConfig:
    """objective (rectified flow)"""

    weighting_scheme: Literal["none", "sigma_sqrt", "logit_normal", "mode", "cosmap"] = "none"
    """how sigma is drawn and the loss weighted, as in diffusers' scripts"""
    logit_mean: float = 0.0
    """logit_normal: mean; as in diffusers, positive favours the data side"""
    logit_std: float = 1.0
    """logit_normal: standard deviation"""
    mode_scale: float = 1.29
    """mode: scale"""
    timestep_shift: str = "none"
    """none; resolution (the shift the pipeline samples with at this size); or a number >= 1 that moves sigma towards noise"""
    guidance_scale: float | None = None
    """distilled guidance while training, only for models with an embedding for it; default 3.5 (1.0 is often better)"""


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """optimizer and schedule (written into DeepSpeed's config)"""

    learning_rate: float = 1e-4
    """peak learning rate"""
    adam_beta1: float = 0.9
    """AdamW beta 1"""
    adam_beta2: float = 0.999
    """AdamW beta 2"""
    adam_weight_decay: float = 1e-4
    """AdamW weight decay"""
    adam_epsilon: float = 1e-8
    """AdamW epsilon"""
    max_grad_norm: float = 1.0
    """clip the global gradient norm; 0: do not clip"""
    lr_scheduler: Literal["linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup"] = (
        "constant"
    )
    """diffusers' schedule names"""
    lr_warmup_steps: int = 0
    """warm-up in optimizer steps, whatever the number of processes"""
    lr_num_cycles: int = 1
    """cosine_with_restarts: number of cycles"""
    lr_power: float = 1.0
    """polynomial: power"""
    ema_decay: float | None = None
    """keep an average of the weights: ema = ema_decay * ema + (1 - ema_decay) * weights after each step; default: none"""
    ema_device: Literal["cpu"] | None = None
    """cpu: keep that average in CPU memory; default: where the optimizer has its fp32 weights"""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """length and batch"""

    train_batch_size: int = 1
    """images per process and micro step"""
    tokens_per_batch: int | None = None
    """instead: image tokens per process and micro step, references included, so that smaller images come in larger batches"""
    gradient_accumulation_steps: int = 1
    """micro steps per optimizer step"""
    max_train_steps: int | None = None
    """optimizer steps; default: what --num_train_epochs needs"""
    num_train_epochs: int = 1
    """passes over the data, unless --max_train_steps is given"""
    max_skipped_steps: int = 10
    """a step whose loss or gradient is not finite is not taken; so many of them in a row end the run"""
    repeats: int = 1
    """how often an epoch visits each sample, each time with its own crop, noise and caption"""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """checkpoints"""

    checkpointing_steps: int = 500
    """optimizer steps between checkpoints; the last step always has one"""
    checkpoints_total_limit: int | None = None
    """keep only this many, the newest; default: all"""
    save_in_background: bool = True
    """copy each rank's part to host memory and write it while training goes on, where there is memory for it"""
    save_nothing: bool = False
    """write no checkpoint, not even at the end: to measure speed and memory"""
    resume_from_checkpoint: str | None = None
    """latest, or the path of a checkpoint folder; default: start anew"""


@dataclass(frozen=True, kw_only=True)
class ZeroConfig:
    """DeepSpeed"""

    deepspeed_config: str = "ds_configs/zero3.json"
    """DeepSpeed JSON of the transformer's engine; "auto" in it means: the flags decide"""
    text_encoder_deepspeed_config: str = "ds_configs/text_encoder_zero3.json"
    """DeepSpeed JSON of the frozen text encoder's engine"""
    sequence_parallel: int = 1
    """Ulysses: so many processes share each sequence, and its activations; it divides the heads and every segment's tokens.
    --train_batch_size is then what each such group of processes takes"""


@dataclass(frozen=True, kw_only=True)
class ValidationConfig:
    """validation"""

    validation_dataset: str | None = None
    """images and captions that are not trained on, read as the data of the run are: same kind, same columns"""
    validation_fraction: float = 0.0
    """instead: keep about this share of the samples out of training; a sample's name decides, whatever the seed"""
    validation_steps: int | None = None
    """optimizer steps between validations, beside one before the first step and one after the last; default: as checkpoints"""
    validation_sigmas: int = 8
    """the loss is taken at so many noise levels, (i + 0.5) / n, each with a sample's own and ever same noise"""
    validation_sigma_by_sample: bool = False
    """each sample at one of those noise levels, by its number, instead of at all of them; as MLPerf does"""
    validation_prompt: str | list[str] | None = None
    """show the model's images of this prompt at each validation; several as a list, or a .txt file with one on each line"""
    validation_image: str | list[str] | None = None
    """reference image to edit by these prompts; several: a,b or a list"""
    num_validation_images: int = 1
    """images of each prompt, each from a noise of its own"""
    num_validation_inference_steps: int = 28
    """steps of the sampler for these images"""
    validation_guidance_scale: float | None = None
    """their distilled or classifier-free guidance; default: the pipeline's"""
    target_validation_loss: float | None = None
    """save and end as soon as the validation loss is as low as this"""
    mlperf_log: str | None = None
    """file for the events of the run in MLPerf's log format"""


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """figures"""

    logging_steps: int = 1
    """optimizer steps between lines of figures, in TensorBoard, logs/metrics.jsonl and --report_to: means of these steps"""
    report_to: str | list[str] | None = None
    """DeepSpeed's monitors that get the figures as well: csv, wandb, comet; several: a,b or a list"""
    peak_tflops: float | None = None
    """what a device can compute at most, in 1e12 operations a second, to say how much of that is used; default: if known"""
    profile: str | None = None
    """look into a step, or several, as in 5-7: a trace of each rank, and a page, profile/profile.md in the run's folder"""
