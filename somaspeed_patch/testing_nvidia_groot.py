"""NVIDIA's own Gr00tN1d7, built tiny and trained on a CPU by its own Gr00tTrainer, natively or patched.

    native = train(folder / "native", patched=False, embodiments=3, images=(3,))
    ours = train(folder / "ours", patched=True, embodiments=3, images=(3,))

The package `gr00t` must be importable, in an environment of its pins (Python 3.10, torch 2.7.1, transformers
4.57.3). Model, trainer, collator and image processor are the package's; only the sizes, the weights and the
samples are made here, and nothing is fetched from a hub.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import somaspeed_patch
from somaspeed_patch import testing_accelerate

BACKBONE = "Qwen/Qwen3-VL-tiny"  # the package tells the backbone's class by this beginning
ROWS = 4  # samples a micro-batch
SEED = 3
EMBODIMENTS = (2, 10, 24)  # rows of the category weights: libero_sim, new_embodiment, droid
_SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
    "<|video_pad|>",
)  # fmt: skip
_TOKEN = {token: 256 + i for i, token in enumerate(_SPECIAL)}  # behind one token a byte
_TASKS = ("open the drawer", "lift", "put the black bowl on the plate", "turn on the stove")
_SIDE, _STATE, _ACTION, _HORIZON = 64, 8, 8, 4


@dataclass
class Updates:
    """What a run did, in the order of its updates."""

    losses: list[float] = field(default_factory=list)
    """of every micro-batch"""
    grad_norms: list[float] = field(default_factory=list)
    """before clipping"""
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    """as the optimizer gets them: clipped"""
    weights: dict[str, Tensor] = field(default_factory=dict)
    """after the last update"""
    report: somaspeed_patch.Report | None = None
    """of the patched run"""


def backbone_config() -> Any:
    """A tiny Qwen3VLConfig of the real one's parts: four layers, with deepstack features for two of them."""
    from transformers import Qwen3VLConfig

    rope = {"mrope_interleaved": True, "mrope_section": [4, 2, 2], "rope_type": "default"}
    text = {
        "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "num_hidden_layers": 4, "vocab_size": 264, "rope_theta": 5000000,
        "rope_scaling": rope, "tie_word_embeddings": True,
    }  # fmt: skip
    vision = {
        "depth": 3, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64,
        "deepstack_visual_indexes": [0, 1], "patch_size": 16, "spatial_merge_size": 2,
        "temporal_patch_size": 2, "num_position_embeddings": 2304,
    }  # fmt: skip
    return Qwen3VLConfig(
        image_token_id=_TOKEN["<|image_pad|>"], video_token_id=_TOKEN["<|video_pad|>"],
        vision_start_token_id=_TOKEN["<|vision_start|>"], vision_end_token_id=_TOKEN["<|vision_end|>"],
        tie_word_embeddings=True, text_config=text, vision_config=vision,
    )  # fmt: skip


def model_settings(backbone: str, dropout: float = 0.0) -> dict[str, Any]:
    """The fields of a tiny model's configuration, by the names that NVIDIA's class and LeRobot's share.

    Args:
        backbone: folder of the vision-language model.
        dropout: of the DiT and of vl_self_attention, and the share of samples that lose their state.
    """
    common = {"positional_embeddings": None, "num_attention_heads": 4, "dropout": dropout}
    diffusion = {
        **common, "num_layers": 4, "attention_head_dim": 12, "norm_type": "ada_norm",
        "final_dropout": True, "output_dim": 32, "interleave_self_attention": True,
    }  # fmt: skip
    attention = {**common, "num_layers": 1, "attention_head_dim": 16, "final_dropout": True}
    return {
        "model_name": backbone, "backbone_model_type": "qwen", "backbone_embedding_dim": 64,
        "select_layer": 3, "load_bf16": False, "use_flash_attention": False, "reproject_vision": False,
        "hidden_size": 32, "input_embedding_dim": 48, "max_state_dim": _STATE, "max_action_dim": _ACTION,
        "action_horizon": _HORIZON, "state_history_length": 1, "max_num_embodiments": 32, "max_seq_len": 32,
        "use_alternate_vl_dit": True, "attend_text_every_n_blocks": 2, "state_dropout_prob": dropout,
        "diffusion_model_cfg": diffusion, "vl_self_attention_cfg": attention,
    }  # fmt: skip


def write_backbone(folder: Path) -> str:
    """Write a tiny Qwen3-VL with its processor below `folder`, where it is not yet.

    Returns: its path, as `model_settings` takes it.
    """
    from transformers import Qwen3VLForConditionalGeneration

    place = folder / BACKBONE
    if not (place / "config.json").exists():
        place.mkdir(parents=True, exist_ok=True)
        _write_processor(place)
        torch.manual_seed(0)
        model = Qwen3VLForConditionalGeneration(backbone_config())
        _shake(model)
        model.save_pretrained(place)
    return str(place)


def _write_processor(place: Path) -> None:
    """A tokenizer of bytes and special tokens, and the image processor at its real patch size."""
    from tokenizers import AddedToken, pre_tokenizers
    from transformers import (
        Qwen2TokenizerFast,
        Qwen2VLImageProcessorFast,
        Qwen3VLProcessor,
        Qwen3VLVideoProcessor,
    )

    vocabulary, merges = place / "vocab.json", place / "merges.txt"
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary.write_text(json.dumps({character: i for i, character in enumerate(alphabet)}))
    merges.write_text("#version: 0.2\n")
    special = {"unk_token": None, "eos_token": _SPECIAL[0], "pad_token": _SPECIAL[0]}
    tokenizer = Qwen2TokenizerFast(str(vocabulary), str(merges), **special)
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIAL])
    images = Qwen2VLImageProcessorFast(
        patch_size=16, temporal_patch_size=2, merge_size=2, image_mean=[0.5] * 3, image_std=[0.5] * 3,
        size={"shortest_edge": 32**2, "longest_edge": _SIDE**2},
    )  # fmt: skip
    Qwen3VLProcessor(images, tokenizer, Qwen3VLVideoProcessor()).save_pretrained(place)


def make_model(folder: Path, dropout: float = 0.0) -> Any:
    """A tiny Gr00tN1d7 with its backbone below `folder`; the caller's RNG state is left as it was."""
    settings = model_settings(write_backbone(folder), dropout)
    config = import_module("gr00t.configs.model.gr00t_n1d7").Gr00tN1d7Config(**settings)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = import_module("gr00t.model.gr00t_n1d7.gr00t_n1d7").Gr00tN1d7(
            config, transformers_loading_kwargs={}
        )
        _shake(model.action_head)
    return model


def _shake(model: nn.Module) -> None:
    """Move every weight: none is zero or one, every path carries a gradient, and a lost weight shows."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)


class Samples(torch.utils.data.IterableDataset[dict[str, Any]]):
    """Endless samples as the package's processor leaves them, before its collator.

    The samples of update k follow from `seed + k` alone. Gr00tTrainer, when it resumes after k updates, sets
    the seed k higher: the run then goes on with the samples that it would have had without the interruption.
    """

    def __init__(self, samples_an_update: int, embodiments: int, images: Sequence[int]) -> None:
        self.seed = 0
        self._samples, self._embodiments, self._images = samples_an_update, embodiments, tuple(images)

    def reset_seed(self, seed: int) -> None:
        """Gr00tTrainer calls it when it resumes."""
        self.seed = seed

    def __iter__(self) -> Iterator[dict[str, Any]]:
        update = self.seed
        while True:
            rng = torch.Generator().manual_seed(update)
            for _ in range(self._samples):
                yield self._sample(rng)
            update += 1

    def _sample(self, rng: torch.Generator) -> dict[str, Any]:
        """A prompt of some length, one of the numbers of images, and an embodiment with its action size."""
        which, images, task = (
            int(torch.randint(count, (1,), generator=rng))
            for count in (self._embodiments, len(self._images), len(_TASKS))
        )
        mask = torch.ones(_HORIZON, _ACTION)
        mask[:, _ACTION - which :] = 0
        return {
            "vlm_content": _prompt(_TASKS[task], self._images[images], rng),
            "state": torch.randn(1, _STATE, generator=rng),
            "action": torch.randn(_HORIZON, _ACTION, generator=rng) * mask,
            "action_mask": mask,
            "embodiment_id": EMBODIMENTS[which],
        }


def _prompt(task: str, images: int, rng: torch.Generator) -> dict[str, Any]:
    from PIL import Image

    pixels = torch.randint(256, (images, _SIDE, _SIDE, 3), generator=rng, dtype=torch.uint8)
    image = "<|vision_start|><|image_pad|><|vision_end|>"
    text = f"<|im_start|>user\n{image * images}{task}<|im_end|>\n"
    return {"text": text, "images": [Image.fromarray(one.numpy()) for one in pixels]}


def train(
    folder: Path,
    *,
    patched: bool,
    steps: int = 20,
    accumulation: int = 1,
    embodiments: int = 1,
    images: Sequence[int] = (1,),
    dropout: float = 0.0,
    save_steps: int = 0,
    resume: bool = False,
) -> Updates:
    """Train a fresh tiny model with the package's own Gr00tTrainer.

    Args:
        folder: for the run's checkpoints; the backbone lies beside it.
        patched: under `somaspeed_patch.patched()`, which is entered before the package is imported where
            that has not happened yet.
        steps: updates.
        accumulation: micro-batches an update.
        embodiments: how many of EMBODIMENTS the samples have.
        images: the numbers of images a sample may have.
        dropout: of the model, see `model_settings`.
        save_steps: updates between checkpoints; 0: none is written.
        resume: go on from the newest checkpoint in `folder`, as the package's launcher asks for.
    """
    with somaspeed_patch.patched() if patched else nullcontext():
        testing_accelerate.forget()
        samples = Samples(ROWS * accumulation, embodiments, images)
        model = make_model(folder.parent, dropout)
        trainer = import_module("gr00t.experiment.trainer").Gr00tTrainer(
            model=model,
            args=_arguments(folder, steps, accumulation, save_steps),
            train_dataset=samples,
            data_collator=model.collator,
        )
        updates = Updates()
        trainer.add_callback(_recorder(trainer, updates, _newest_checkpoint(folder) if resume else None))
        trainer.train(resume_from_checkpoint=resume)
        updates.report = somaspeed_patch.report() if patched else None
    logged = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    updates.grad_norms = [entry["grad_norm"] for entry in logged][-len(updates.gradients) :]
    updates.weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return updates


def _arguments(folder: Path, steps: int, accumulation: int, save_steps: int) -> Any:
    """The package's own settings in fp32, at a rate and a norm at which updates differ and some are clipped.

    The gradient of a key projection's bias is zero but for rounding, and AdamW would scale that rounding up
    to a whole step: with this epsilon, which is about the rms of the gradients, it stays rounding.
    """
    from transformers import TrainingArguments

    return TrainingArguments(
        output_dir=str(folder), use_cpu=True, report_to="none", disable_tqdm=True, logging_steps=1,
        max_steps=steps, per_device_train_batch_size=ROWS, gradient_accumulation_steps=accumulation,
        save_strategy="steps" if save_steps else "no", save_steps=save_steps or steps, seed=SEED,
        optim="adamw_torch", learning_rate=1e-3, adam_epsilon=1e-3, weight_decay=1e-5, max_grad_norm=1.0,
        lr_scheduler_type="cosine", warmup_ratio=0.05, remove_unused_columns=False, ignore_data_skip=True,
        dataloader_num_workers=0,
    )  # fmt: skip


def _newest_checkpoint(folder: Path) -> str:
    from transformers.trainer_utils import get_last_checkpoint

    found: str | None = get_last_checkpoint(str(folder))
    if found is None:
        raise ValueError(f"train: expected a checkpoint to resume from in {folder}, but there is none")
    return found


def _recorder(trainer: Any, updates: Updates, resumed: str | None) -> Any:
    from transformers import TrainerCallback

    class Recorder(TrainerCallback):  # type: ignore[misc]
        """Keeps the loss that Gr00tTrainer remembers of each micro-batch, and each update's gradients."""

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            """Trainer restores the RNG before it makes the loader's iterator, which draws from it."""
            if resumed and not updates.losses:
                trainer._load_rng_state(resumed)

        def on_substep_end(self, *_: Any, **__: Any) -> None:
            updates.losses.append(trainer.loss.item())

        def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
            updates.losses.append(trainer.loss.item())
            gradients = ((name, parameter.grad) for name, parameter in model.named_parameters())
            updates.gradients.append({name: grad.clone() for name, grad in gradients if grad is not None})

    return Recorder()
