"""The tiny pi0.5: tokenizer, sizes, that shrinking is undone, and that it trains."""

import os
import subprocess
import sys

import pytest
import torch

from somaspeed_patch.testing_pi05 import make_batch, make_policy
from somaspeed_patch.tiny_pi05 import byte_tokenizer, shrink, sizes

PROMPT = "Task: pick up the black bowl, State: 12 255 0;\nAction: "


@pytest.fixture
def redirected():
    byte_tokenizer.install()
    yield
    byte_tokenizer.uninstall()


def test_tokenizer_round_trip():
    tokenizer = byte_tokenizer.LocalTokenizer.from_pretrained("google/paligemma-3b-pt-224")
    encoded = tokenizer([PROMPT, "\u00e9"], padding="max_length", max_length=64, truncation=True)
    assert tokenizer.decode(encoded["input_ids"][0], skip_special_tokens=True) == PROMPT
    assert tokenizer.decode(encoded["input_ids"][1], skip_special_tokens=True) == "\u00e9"
    assert sum(encoded["attention_mask"][0]) == len(PROMPT) and sum(encoded["attention_mask"][1]) == 2
    assert tokenizer.pad_token_id == 0 and len(tokenizer) <= sizes.VOCABULARY


def test_the_shipped_files_are_what_the_function_writes(tmp_path):
    byte_tokenizer.write(tmp_path)
    for file in tmp_path.iterdir():
        assert file.read_text() == (byte_tokenizer.DIRECTORY / file.name).read_text()


def test_redirection_leaves_local_directories_alone(redirected, tmp_path):
    from lerobot.processor.tokenizer_processor import TokenizerProcessorStep
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?").save_pretrained(tmp_path)
    assert len(TokenizerProcessorStep(tokenizer_name=str(tmp_path)).input_tokenizer) == 3
    assert len(TokenizerProcessorStep(tokenizer_name="google/paligemma-3b-pt-224").input_tokenizer) == 260


def test_redirection_is_undone():
    from lerobot.processor import tokenizer_processor as host

    before = host.AutoTokenizer
    byte_tokenizer.install()
    byte_tokenizer.install()
    assert host.AutoTokenizer is byte_tokenizer.LocalTokenizer
    byte_tokenizer.uninstall()
    assert host.AutoTokenizer is before


@pytest.mark.parametrize(
    ("size", "total", "trainable"), [("micro", 255720, 65608), ("small", 3176328, 400264)]
)
def test_parameter_counts(size, total, trainable):
    policy = make_policy(size=size, train_expert_only=True)
    counted = (
        [p.numel() for p in policy.parameters()],
        [p.numel() for p in policy.parameters() if p.requires_grad],
    )
    assert tuple(map(sum, counted)) == (total, trainable)


def test_shrinking_is_undone():
    from lerobot.policies.pi05 import modeling_pi05 as host

    before = dict(vars(host))
    with shrink.shrunk(sizes.SIZES["micro"]):
        assert (
            host.get_gemma_config("gemma_2b").width == 64 and host.get_gemma_config("gemma_300m").width == 32
        )
        with shrink.shrunk(sizes.SIZES["small"]):
            assert host.get_gemma_config("gemma_2b").width == 192
        assert host.get_gemma_config("gemma_2b").width == 64
    shrink.install(sizes.SIZES["small"])
    shrink.install(sizes.SIZES["micro"])
    assert host.get_gemma_config("gemma_2b").width == 64
    shrink.uninstall()
    assert vars(host) == before


def test_an_unknown_size_names_the_known_ones(monkeypatch):
    monkeypatch.setenv(sizes.VARIABLE, "large")
    with pytest.raises(ValueError, match=r"size must be one of \['micro', 'small'\], but is 'large'"):
        sizes.from_environment()


def test_the_same_seed_gives_the_same_policy_and_leaves_the_rng_alone():
    torch.manual_seed(3)
    state = torch.get_rng_state()
    first, second, other = (make_policy(seed=seed) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert not torch.equal(next(first.parameters()), next(other.parameters()))


def test_trains_one_step_and_every_trainable_weight_but_the_unused_head_has_a_gradient():
    policy = make_policy(cameras=2, train_expert_only=True)
    optimizer = torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad], lr=1e-3)
    losses = []
    for _ in range(2):
        torch.manual_seed(0)  # the same noise and time
        loss, _ = policy.forward(make_batch(policy, present=[0], language_lengths=[48, 7, 1, 30]))
        loss.backward()
        silent = [
            n
            for n, p in policy.named_parameters()
            if p.requires_grad and (p.grad is None or not p.grad.any())
        ]
        assert silent == ["model.paligemma_with_expert.gemma_expert.lm_head.weight"]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[1] < losses[0]


def test_batches_refuse_lengths_that_do_not_fit():
    policy = make_policy()
    with pytest.raises(ValueError, match=r"must be 4 numbers in 0..48, but is \[1, 2, 3, 49\]"):
        make_batch(policy, language_lengths=[1, 2, 3, 49])


def test_discovery_shrinks_and_plain_import_does_not():
    code = (
        "from lerobot.policies.pi05 import modeling_pi05 as host\n"
        "import somaspeed_patch.tiny_pi05.shrink\n"
        "print(host.get_gemma_config('gemma_2b').width)\n"
        "from lerobot.configs.parser import load_plugin\n"
        "load_plugin('somaspeed_patch.tiny_pi05')\n"
        "print(host.get_gemma_config('gemma_2b').width)"
    )
    environment = {**os.environ, sizes.VARIABLE: "small"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout.split() == ["2048", "192"], done.stderr
