"""The host's whole action head with all of its hooks, run eagerly and with compiled blocks."""

from functools import partial

import pytest
import torch
from lerobot.policies.groot import groot_n1_7
from lerobot.policies.groot.action_head import cross_attention_dit as host
from torch._dynamo.utils import counters

from somaspeed_patch import features, sites
from somaspeed_patch.groot import category_linear, dit
from somaspeed_patch.testing_groot_head import CONTEXT, assert_equal_steps, head_step, make_head

HOOKS = [
    (host.AlternateVLDiT, dit.forward),
    (host.SelfAttentionTransformer, dit.self_attention),
    (groot_n1_7.CategorySpecificLinear, category_linear.forward),
]
ONE, THREE = [2, 2, 2], [5, 0, 2]


@pytest.fixture
def feature(monkeypatch):
    """What is on. The hooks are put in by `hooked`."""
    on = {"modality_kv": True, "category_linear": True}
    monkeypatch.setattr(features, "value", on.get)
    torch._dynamo.reset()
    counters.clear()
    sites.clear()
    dit.release()
    yield on
    sites.clear()
    dit.release()


@pytest.fixture
def hooked(feature, monkeypatch):
    """The head's step with the hooks in place."""

    def run(head, ids, **arguments):
        with monkeypatch.context() as patched:
            for owner, hook in HOOKS:
                patched.setattr(owner, "forward", _method(owner.forward, hook))
            return head_step(head, ids, **arguments)

    return run


def _method(original, hook):
    return lambda self, *args, **kwargs: hook(partial(original, self), self, args, kwargs)


def counts(name):
    found = sites.site(f"groot/{name}")
    return found.calls, found.native_calls, found.fallbacks


@pytest.mark.parametrize("ids", [ONE, THREE], ids=["one", "three"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_loss_and_gradients_are_the_hosts(ids, dropout, hooked):
    head = make_head(dropout)
    assert_equal_steps(head_step(head, ids), hooked(head, ids))
    assert (counts("modality_kv"), counts("category_linear")) == ((1, 0, 0), (7, 0, 0))
    assert counts("compile") == (0, 0, 0)


@pytest.mark.parametrize("recompute", [False, True])
def test_compiled_blocks(recompute, feature, hooked, without_codegen):
    """Dropout draws eager's masks and leaves the generator as eager does; Inductor's own would not."""
    feature.update(compile=True, recompute=recompute)
    head, text = make_head(0.2), [4, 6, 1]  # as many as of images, so one graph serves both
    blocks = [*head.model.transformer_blocks, *head.vl_self_attention.transformer_blocks]
    before = [vars(block.attn1).copy() for block in blocks]
    assert_equal_steps(head_step(head, THREE, text=text), hooked(head, THREE, text=text))
    assert (counts("modality_kv"), counts("compile")) == ((1, 0, 0), (5, 0, 0))
    assert counters["stats"]["unique_graphs"] == 3  # cross, self, the backbone's
    assert not counters["graph_break"]
    assert [vars(block.attn1) for block in blocks] == before  # each its own processor object again


@pytest.mark.gpu
@pytest.mark.parametrize("on", [{}, {"compile": True}, {"compile": True, "recompute": True}], ids=str)
@pytest.mark.parametrize("autocast", [False, True])
def test_on_a_gpu(on, autocast, feature, hooked):
    """With another dropout mask the loss would be off by a tenth."""
    feature.update(on)
    head = make_head(0.2).float().cuda()
    theirs, ours = head_step(head, THREE, autocast=autocast), hooked(head, THREE, autocast=autocast)
    assert torch.equal(ours.random_state, theirs.random_state)
    tolerance = 2e-2 if autocast else 1e-4
    assert abs(ours.loss - theirs.loss) <= tolerance * theirs.loss
    for name in ("states", "action_encoder.W2.W"):
        expected = theirs.gradients[name]
        assert (ours.gradients[name] - expected).norm() <= 2 * tolerance * expected.norm(), name
    assert (counts("modality_kv"), counts("category_linear")) == ((1, 0, 0), (7, 0, 0))


def transformer():
    torch.manual_seed(0)
    return host.SelfAttentionTransformer(
        num_attention_heads=2, attention_head_dim=CONTEXT // 2, num_layers=2, positional_embeddings=None
    )


@pytest.mark.parametrize("everything", [False, True])
def test_what_self_attention_returns(everything, feature, monkeypatch):
    """Both of the host's forms; the blocks themselves are the whole head's test."""
    feature["compile"] = True
    monkeypatch.setattr(dit._layers, "of", lambda eager: eager)
    made, hidden = transformer().eval(), torch.randn(2, 7, CONTEXT)
    theirs = made(hidden, everything)
    ours = dit.self_attention(None, made, (hidden,), dict(return_all_hidden_states=everything))
    assert type(ours) is type(theirs)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_self_attention_is_the_hosts_without_compile(feature):
    made, hidden = transformer().eval(), torch.randn(2, 7, CONTEXT)
    served = []
    dit.self_attention(lambda *args, **kwargs: served.append((args, kwargs)), made, (hidden,), dict(a=1))
    assert served == [((hidden,), dict(a=1))]
    assert not sites.every()
