"""LeRobot's policies for an RL run: made by their own classes, patched, frozen as RL needs them."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

import somaspeed_patch
from somaspeed_patch.ab.yaml_reader import nearest
from somaspeed_patch.rl.env_libero import CAMERAS
from somaspeed_patch.rl.env_process import ACTION
from somaspeed_patch.rl.flow_policy import FlowPolicy
from somaspeed_patch.rl.lerobot_interface import LeRobotInterface
from somaspeed_patch.rl_run.recipe import Recipe

_STATE = 8  # numbers of LIBERO's robot, see env_libero
_FLOWS = {
    "pi05": "somaspeed_patch.rl.pi05_flow:PI05Flow",
    "molmoact2": "somaspeed_patch.rl.molmoact2_flow:MolmoAct2Flow",
    "groot": "somaspeed_patch.rl.groot_flow:GrootFlow",
}
_FROZEN: Mapping[str, Mapping[str, Any]] = {
    "pi05": {"train_expert_only": True, "compile_model": False, "gradient_checkpointing": False},
    "molmoact2": {
        "train_action_expert_only": True, "action_mode": "continuous", "gradient_checkpointing": False,
    },
    "groot": {"tune_llm": False, "tune_visual": False, "tune_top_llm_layers": 0},
}  # fmt: skip
"""What RL from cached features needs of a configuration; the recipe's own words go over it."""


class LeRobotParts:
    """A policy, its interface, and how LeRobot keeps them; see `build.Parts`."""

    def __init__(self, policy: FlowPolicy, preprocessor: Any, postprocessor: Any, rename: Mapping[str, str]):
        self.policy = policy
        self.interface = LeRobotInterface(preprocessor, postprocessor, rename)
        self._processors = (preprocessor, postprocessor)

    def save(self, directory: Path) -> None:
        """As LeRobot does: config.json, model.safetensors, both processors."""
        host: Any = self.policy.policy
        host.save_pretrained(directory)
        for each in self._processors:
            each.save_pretrained(directory)


def make(recipe: Recipe, saved: Path | None = None) -> LeRobotParts:
    """The recipe's policy.

    Args: saved: what `LeRobotParts.save` wrote, in place of the recipe's path.
    Raises: ValueError: the checkpoint is incomplete, of another type, or a field of `config` is unknown.
    """
    wanted = recipe.policy
    kind = str(wanted.type)
    somaspeed_patch.patch(kind)
    path = _folder(str(saved or wanted.path)) if saved or wanted.path else None
    config = _config(recipe, kind, path)
    host = _host(kind, config, path)
    module, _, name = _FLOWS[kind].partition(":")
    dtype = None if wanted.autocast is None else getattr(torch, wanted.autocast)
    options = {"pool": wanted.pool} if kind == "pi05" else {}
    flow: FlowPolicy = getattr(importlib.import_module(module), name)(host, autocast=dtype, **options)
    pre, post = _processors(config, path, wanted.stats)
    return LeRobotParts(flow, pre, post, wanted.rename)


def _folder(path: str) -> Path:
    """A whole checkpoint on this machine: without a file LeRobot's pi0.5 goes on with random weights."""
    folder = Path(path)
    if not folder.is_dir() and (folder.is_absolute() or path.startswith(".")):
        raise ValueError(f"policy.path: expected a LeRobot checkpoint's folder, but there is no {path}")
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(path))
    missing = [name for name in ("config.json", "model.safetensors") if not (folder / name).is_file()]
    if missing:
        raise ValueError(
            f"policy.path: {folder} has no {' and no '.join(missing)}; expected a LeRobot checkpoint"
        )
    return folder


def _config(recipe: Recipe, kind: str, path: Path | None) -> Any:
    importlib.import_module("lerobot.policies.factory")  # registers the types
    from lerobot.configs import PreTrainedConfig

    _check_type(kind, path)
    wanted, cls = recipe.policy, PreTrainedConfig.get_choice_class(kind)
    overrides = {**_FROZEN[kind], **wanted.config}
    known = [each.name for each in fields(cls)]
    for name in wanted.config:
        if name not in known:
            raise ValueError(f"policy.config: {kind} has no field {name}{nearest(name, known)}")
    words = [f"--{name}={_word(value)}" for name, value in overrides.items()]
    config = (
        _parsed(cls, words) if path is None else PreTrainedConfig.from_pretrained(path, cli_overrides=words)
    )
    config.device = wanted.device or ("cuda" if torch.cuda.is_available() else "cpu")
    config.push_to_hub = False
    if path is None:
        _add_features(config, recipe)
    return config


def _check_type(kind: str, path: Path | None) -> None:
    """Before draccus ends the process over fields of another type."""
    found = kind if path is None else json.loads((path / "config.json").read_text()).get("type")
    if found != kind:
        raise ValueError(f"policy.path: expected a checkpoint of {kind}, but {path} is of {found}")


def _parsed(cls: Any, words: list[str]) -> Any:
    import draccus

    with draccus.config_type("json"):
        return draccus.parse(cls, args=words)


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _add_features(config: Any, recipe: Recipe) -> None:
    """LIBERO's, by the names that this policy has for them."""
    from lerobot.configs import FeatureType, PolicyFeature

    side, rename = recipe.env.image_size, recipe.policy.rename
    image = PolicyFeature(type=FeatureType.VISUAL, shape=(3, side, side))
    seen = {f"observation.images.{camera}": image for camera in CAMERAS}
    seen["observation.state"] = PolicyFeature(type=FeatureType.STATE, shape=(_STATE,))
    config.input_features = {rename.get(name, name): each for name, each in seen.items()}
    config.output_features = {"action": PolicyFeature(type=FeatureType.ACTION, shape=(ACTION,))}


def _host(kind: str, config: Any, path: Path | None) -> Any:
    from lerobot.policies.factory import get_policy_class

    cls: Any = get_policy_class(kind)
    host = cls(config) if path is None else cls.from_pretrained(path, config=config)
    return host.to(config.device)


def _processors(config: Any, path: Path | None, stats: Mapping[str, Mapping[str, Any]]) -> tuple[Any, Any]:
    from lerobot.policies.factory import make_pre_post_processors

    if path is None:
        given = {
            name: {kind: torch.as_tensor(value, dtype=torch.float32) for kind, value in each.items()}
            for name, each in stats.items()
        }
        found: tuple[Any, Any] = make_pre_post_processors(config, dataset_stats=given or None)
        return found
    overrides = {"device_processor": {"device": str(config.device)}}
    found = make_pre_post_processors(config, pretrained_path=str(path), preprocessor_overrides=overrides)
    return found
