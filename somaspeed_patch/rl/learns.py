"""Is the learning real? Demonstrations, a cloned policy, PPO on LIBERO with its 0/1 reward; no images.

    python -m somaspeed_patch.rl.learns --demonstrations FILE --seed 0 --out FILE

and with `--lag 1` side by side. The cloned policy and the trained one play the same episodes without noise,
before and after; the results have both success rates with their standard errors, and the curve between.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from somaspeed_patch.ab import machine, results
from somaspeed_patch.rl.actor import Actor
from somaspeed_patch.rl.clone import clone
from somaspeed_patch.rl.collect import Collector, Plan
from somaspeed_patch.rl.env_pool import EnvPool
from somaspeed_patch.rl.env_process import EnvSpec
from somaspeed_patch.rl.flow_sde import Flow
from somaspeed_patch.rl.learner import Learner
from somaspeed_patch.rl.libero_states import LiberoStates, load
from somaspeed_patch.rl.player import LocalPlayer
from somaspeed_patch.rl.run import Iteration, SideBySide, one_behind_the_other
from somaspeed_patch.rl.settings import Settings
from somaspeed_patch.rl.value_head import ValueHead

log = logging.getLogger(__name__)

_EVALUATION = 1_000_003  # seed of the episodes that both policies play


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    """See the module; also returns what it writes."""
    args = _parser().parse_args(words)
    torch.set_num_threads(1)
    settings = _settings(args)
    episodes = [each for file in args.demonstrations for each in load(file)][: args.demonstrated]
    policy, loss = clone(episodes, horizon=args.executed, steps=args.clone_steps, seed=args.seed)
    spec = EnvSpec(task=args.task, horizon=args.horizon)
    with EnvPool([spec] * args.slots) as pool:
        torch.manual_seed(args.seed)
        learner = Learner(policy, ValueHead(policy.value_width, (256, 256)), settings)
        before = _success(learner, pool, args)
        log.info("cloned: %s", before)
        curve = [_line(each) for each in _iterations(learner, pool, args)]
        after = _success(learner, pool, args)
    log.info("trained: %s", after)
    found = {
        **results.head("learning on LIBERO"),
        "machine": machine.processor(),
        "arguments": {name: str(value) for name, value in vars(args).items() if name != "out"},
        "clone_loss": loss,
        "before": before,
        "after": after,
        "curve": curve,
    }
    args.out.write_text(json.dumps(found, indent=2) + "\n")
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="learns")
    parser.add_argument(
        "--demonstrations", type=Path, nargs="+", required=True, help="what libero_states wrote"
    )
    parser.add_argument("--demonstrated", type=int, default=20, help="how many of them are cloned")
    parser.add_argument("--clone-steps", type=int, default=2000)
    parser.add_argument("--task", type=int, default=0)
    parser.add_argument("--horizon", type=int, default=160, help="environment steps of an episode")
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--episodes", type=int, default=32, help="of each slot and iteration")
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--evaluated", type=int, default=50, help="episodes of each slot and evaluation")
    parser.add_argument("--executed", type=int, default=8, help="steps of a chunk")
    parser.add_argument("--steps", type=int, default=4, help="K, network evaluations a chunk")
    parser.add_argument("--noise", type=float, default=0.3, help="a")
    parser.add_argument("--actor-lr", type=float, default=3e-4)
    parser.add_argument("--critic-lr", type=float, default=1e-3)
    parser.add_argument("--update-epoch", type=int, default=4)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--critic-warmup", type=int, default=20, help="optimizer steps")
    parser.add_argument("--lag", type=int, help="side by side, with samples at most so many versions old")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    return parser


def _settings(args: argparse.Namespace) -> Settings:
    return Settings(
        flow=Flow(steps=args.steps, noise_level=args.noise),
        executed=args.executed,
        update_epoch=args.update_epoch,
        global_batch=args.batch,
        micro_batch=args.batch,
        actor_lr=args.actor_lr,
        critic_lr=args.critic_lr,
        weight_decay=0.0,
        critic_warmup=args.critic_warmup,
        seed=args.seed,
    )


def _actor(learner: Learner, *, twin: bool) -> Actor:
    """The learner's own weights, or others that follow them."""
    policy = learner.policy.twin() if twin else learner.policy
    critic = ValueHead(policy.value_width, (256, 256)) if twin else learner.value_head
    return Actor(
        policy, critic, LiberoStates(), flow=learner.settings.flow, executed=learner.settings.executed
    )


def _iterations(learner: Learner, pool: EnvPool, args: argparse.Namespace) -> Iterator[Iteration]:
    collector = Collector(pool, Plan(episodes=args.episodes, seed=args.seed))
    with ExitStack() as stack:
        if args.lag is None:
            run = one_behind_the_other(learner, collector, _actor(learner, twin=False))
        else:
            player = LocalPlayer(collector, _actor(learner, twin=True))
            run = iter(stack.enter_context(SideBySide(learner, player, lag=args.lag)))
        for _ in range(args.iterations):
            yield next(run)


def _success(learner: Learner, pool: EnvPool, args: argparse.Namespace) -> dict[str, float]:
    """Of the policy as it is, without noise."""
    plan = Plan(episodes=args.evaluated, seed=_EVALUATION + args.seed, noise=False)
    rollout = Collector(pool, plan).collect(_actor(learner, twin=False))
    share, count = rollout.success, len(rollout.trajectories)
    return {"success": share, "standard_error": math.sqrt(share * (1 - share) / count), "episodes": count}


def _line(iteration: Iteration) -> dict[str, Any]:
    """One point of the curve."""
    line = {
        "iteration": iteration.number,
        "time": time.time(),
        "success": iteration.rollout.success,
        "env_steps": iteration.rollout.env_steps,
        "failures": len(iteration.rollout.failures),
        **iteration.metrics,
        "seconds": iteration.seconds,
    }
    log.info(
        "%d: success %.2f, kl %.4f, clipped %.2f, explained %.2f",
        iteration.number,
        line["success"],
        iteration.metrics.get("losses/approx_kl", float("nan")),
        iteration.metrics.get("losses/clipfrac", float("nan")),
        iteration.metrics["losses/explained_variance"],
    )
    return line


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s", force=True)
    main()
