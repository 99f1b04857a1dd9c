"""A recipe's DeepSpeed config of ZeRO-1 or ZeRO-2, taken out before transformers acts on it.

FSDP2 over the same ranks splits what ZeRO-2 splits. What else the config says must be what the Trainer does
without it: values are "auto" or equal to the Trainer's, as DeepSpeed's integration itself demands.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from somaspeed_patch import features, sites

log = logging.getLogger(__name__)

SITE = "layouts_trainer/zero"
ONE_GROUP = "_somaspeed_one_group"
_HARMLESS = (
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping",
    "fp16", "bf16", "zero_optimization", "optimizer", "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer", "communication_data_type", "prescale_gradients",
    "gradient_predivide_factor", "checkpoint", "steps_per_print", "wall_clock_breakdown", "memory_breakdown",
    "dump_state", "comms_logger", "flops_profiler", "tensorboard", "wandb", "csv_monitor",
)  # fmt: skip
_ADAMW = ("adam", "adamw")
_HOSTS_ADAMW = ("adamw_torch", "adamw_torch_fused")


def post_init(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """TrainingArguments.__post_init__(): what `deepspeed=` asks for is the layout's now.

    Raises: ValueError: the config asks for what FSDP2 would not do.
    """
    if features.value("layout") is not None and instance.deepspeed:
        _take_out(instance, _read(instance.deepspeed))
    return wrapped(*args, **kwargs)


def nvidia_config(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """gr00t's Config.get_deepspeed_config(): None, where nothing in it needs the TrainingArguments."""
    config = wrapped(*args, **kwargs)
    if features.value("layout") is None or not isinstance(config, dict):
        return config
    _check(config)
    asks = [value for _, value, _ in _pairs(config, None)]
    if (
        "optimizer" in config
        or "gradient_clipping" not in config
        or any(v not in (None, "auto") for v in asks)
    ):
        return config  # post_init sees it next
    _say(config, getattr(instance, "training", None))
    return None


def decay_parameter_names(
    wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[str]:
    """Trainer.get_decay_parameter_names(model): all, where DeepSpeed's config had an optimizer of its own."""
    names: list[str] = wrapped(*args, **kwargs)
    if not vars(instance.args).get(ONE_GROUP):
        return names
    model = args[0] if args else kwargs["model"]
    return [name for name, _ in model.named_parameters()]


def _take_out(training: Any, config: Mapping[str, Any]) -> None:
    _check(config)
    for name, asked, own in _pairs(config, training):
        if asked not in (None, "auto", own):
            raise ValueError(
                f"layout: the DeepSpeed config says {name}={asked}, the TrainingArguments {own}; make it auto"
            )
    if "optimizer" in config:
        _own_optimizer(training)
    if "gradient_clipping" not in config and training.max_grad_norm:
        log.warning("layout: the DeepSpeed config has no gradient_clipping, so nothing is clipped")
        training.max_grad_norm = 0.0
    training.deepspeed = None
    _say(config, training)


def _own_optimizer(training: Any) -> None:
    chosen = str(getattr(training.optim, "value", training.optim))
    if chosen not in _HOSTS_ADAMW:
        raise ValueError(
            f"layout: the DeepSpeed config has an AdamW of its own, the TrainingArguments optim={chosen}; "
            f"set optim={_HOSTS_ADAMW[0]}"
        )
    vars(training)[ONE_GROUP] = True  # DeepSpeed's decays biases and norms too


def _say(config: Mapping[str, Any], settings: Any) -> None:
    site, stage = sites.site(SITE), config["zero_optimization"]["stage"]
    half = getattr(settings, "bf16", False) or getattr(settings, "fp16", False)
    kept = "; its 16-bit weights with fp32 masters are fp32 weights under autocast now" if half else ""
    site.ran()
    site.reason = f"ZeRO-{stage} taken out, layout={features.value('layout')} in its place{kept}"
    log.info("layout: %s", site.reason)


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    return config.get(name) or {}


def _check(config: Mapping[str, Any]) -> None:
    """Refuse what FSDP2 would not do.

    Raises: ValueError: names it, and what to change.
    """
    why = next(_refusals(config), None)
    if why is not None:
        raise ValueError(f"layout: the DeepSpeed config {why}, or drop layout to train with DeepSpeed")


def _refusals(config: Mapping[str, Any]) -> Iterator[str]:
    zero = _section(config, "zero_optimization")
    stage = zero.get("stage", 0)
    if stage not in (1, 2):
        yield f"is of ZeRO stage {stage}; layout replaces 1 and 2: set stage to 2"
    for name, value in zero.items():
        if "offload" in name and value and not (isinstance(value, dict) and value.get("device") == "none"):
            yield f"moves state to the host ({name}); remove it, and raise dp_shard for memory"
        if name.startswith("zero_quantized") and value:
            yield f"quantizes what it sends ({name}); remove it"
    for name in config:
        if name not in _HARMLESS:
            yield f"has {name}, which nothing here does; remove it"
    optimizer = _section(config, "optimizer")
    kind, settings = str(optimizer.get("type", "AdamW")), optimizer.get("params") or {}
    if kind.lower() not in _ADAMW or settings.get("adam_w_mode") is False:
        yield f"has the optimizer {kind}, which is not AdamW; remove it and set the TrainingArguments' optim"


def _pairs(config: Mapping[str, Any], training: Any) -> Iterator[tuple[str, Any, Any]]:
    """What both say: the config's name, its value, and the Trainer's, which is None without `training`."""
    settings = _section(config, "optimizer").get("params") or {}
    clip, floats = config.get("gradient_clipping"), _Settings(training)
    yield "train_batch_size", config.get("train_batch_size"), floats.global_batch
    yield (
        "train_micro_batch_size_per_gpu", config.get("train_micro_batch_size_per_gpu"),
        floats.of("per_device_train_batch_size"),
    )  # fmt: skip
    accumulate = "gradient_accumulation_steps"
    yield accumulate, config.get(accumulate), floats.of(accumulate)
    yield "gradient_clipping", clip, floats.of("max_grad_norm")
    yield "optimizer.params.lr", settings.get("lr"), floats.of("learning_rate")
    yield "optimizer.params.betas", settings.get("betas"), floats.betas
    yield "optimizer.params.eps", settings.get("eps"), floats.of("adam_epsilon")
    yield "optimizer.params.weight_decay", settings.get("weight_decay"), floats.of("weight_decay")
    for half in ("fp16", "bf16"):
        asked = _section(config, half).get("enabled")
        yield f"{half}.enabled", asked, bool(floats.of(half) or floats.of(f"{half}_full_eval"))


class _Settings:
    """TrainingArguments by name, None without them."""

    def __init__(self, training: Any) -> None:
        self._training = training

    def of(self, name: str) -> Any:
        return getattr(self._training, name, None)

    @property
    def betas(self) -> list[float]:
        return [self.of("adam_beta1"), self.of("adam_beta2")]

    @property
    def global_batch(self) -> int:
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        own = self.of("per_device_train_batch_size") or 0
        return ranks * own * (self.of("gradient_accumulation_steps") or 0)


def _read(given: Any) -> Mapping[str, Any]:
    """The config as the Trainer takes it: a dict, JSON, or a file of JSON.

    Raises: ValueError: it is none of these.
    """
    if isinstance(given, Mapping):
        return given
    text = str(given)
    file = Path(text) if len(text) < 4096 and not text.lstrip().startswith("{") else None
    if file is not None and file.is_file():
        text = file.read_text()
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(f"layout: deepspeed={text[:80]!r} is neither JSON nor a file of JSON") from error
    return found  # type: ignore[no-any-return]
