"""LeRobot's GR00T N1.7 under transformers.Trainer, on lerobot-train's command line.

    python -m somaspeed_patch.tiny_groot.hf_trainer --policy.type=groot --dataset.root=... --steps=20 ...

For the loop that NVIDIA's package uses, where that package is not installed: transformers' Trainer with its
AdamW, clipping and cosine schedule, over a loader that is not accelerate's and whose workers preprocess and
collate, as Gr00tTrainer's do. Policy, preprocessor and data set are LeRobot's. What the Trainer has no use
for (environments, LeRobot's checkpoints and logging) is ignored.
"""

from collections.abc import Sequence
from typing import Any

from lerobot.configs import parser
from lerobot.configs.train import TrainPipelineConfig


@parser.wrap()  # type: ignore[untyped-decorator]  # it reads the annotation, which must not be a string
def main(cfg: TrainPipelineConfig) -> None:
    """Train for `cfg.steps` updates."""
    from lerobot.datasets.factory import make_dataset
    from lerobot.policies.factory import make_policy, make_pre_post_processors
    from transformers import set_seed

    cfg.validate()
    set_seed(cfg.seed)
    dataset = make_dataset(cfg)
    policy = make_policy(cfg=cfg.policy, ds_meta=dataset.meta)
    preprocessor, _ = make_pre_post_processors(policy_cfg=cfg.policy, dataset_stats=dataset.meta.stats)
    trainer_of(cfg, policy, dataset, Collator(preprocessor)).train()


class Collator:
    """Samples of LeRobot's data set as a batch that its policy takes, on the CPU: for a loader's worker."""

    def __init__(self, preprocessor: Any) -> None:
        from lerobot.processor import DeviceProcessorStep

        self._preprocess = preprocessor
        steps = [step for step in preprocessor.steps if not isinstance(step, DeviceProcessorStep)]
        preprocessor.steps = steps  # the Trainer moves the batch

    def __call__(self, samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
        from torch.utils.data import default_collate

        return {"batch": self._preprocess(default_collate(list(samples)))}


def trainer_of(cfg: TrainPipelineConfig, policy: Any, dataset: Any, collator: Collator) -> Any:
    """A Trainer with the settings of LeRobot's command line, and NVIDIA's schedule."""
    from torch.utils.data import DataLoader
    from transformers import Trainer

    class LoaderTrainer(Trainer):  # type: ignore[misc]
        """Its loader is a raw one, as Gr00tTrainer's, which accelerate never sees."""

        def get_train_dataloader(self) -> Any:
            workers = self.args.dataloader_num_workers
            return DataLoader(
                self.train_dataset,
                batch_size=self.args.per_device_train_batch_size,
                shuffle=True,
                collate_fn=self.data_collator,
                num_workers=workers,
                persistent_workers=workers > 0,
                multiprocessing_context="fork" if workers else None,
                pin_memory=self.args.dataloader_pin_memory,
                drop_last=True,
            )

    return LoaderTrainer(model=policy, args=_arguments(cfg), train_dataset=dataset, data_collator=collator)


def _arguments(cfg: TrainPipelineConfig) -> Any:
    from transformers import TrainingArguments

    if cfg.policy is None:
        raise ValueError("tiny_groot.hf_trainer: expected a policy, but got none; add --policy.type=groot")
    preset: Any = cfg.policy.get_optimizer_preset()
    return TrainingArguments(
        output_dir=str(cfg.output_dir),
        max_steps=cfg.steps,
        per_device_train_batch_size=cfg.batch_size,
        dataloader_num_workers=cfg.num_workers,
        dataloader_pin_memory=cfg.policy.device != "cpu",
        seed=cfg.seed if cfg.seed is not None else 42,
        use_cpu=cfg.policy.device == "cpu",
        optim="adamw_torch",
        learning_rate=preset.lr,
        adam_beta1=preset.betas[0],
        adam_beta2=preset.betas[1],
        adam_epsilon=preset.eps,
        weight_decay=preset.weight_decay,
        max_grad_norm=preset.grad_clip_norm,
        lr_scheduler_type="cosine",
        warmup_ratio=0.05,
        logging_steps=cfg.log_freq,
        save_strategy="no",
        report_to="none",
        remove_unused_columns=False,
        disable_tqdm=True,
    )


if __name__ == "__main__":
    main()
