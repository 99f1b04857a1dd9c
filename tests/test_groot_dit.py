"""GR00T's AlternateVLDiT with each block's own modality only, against the host's own classes."""

from functools import partial

import pytest
import torch
from lerobot.policies.groot.action_head import cross_attention_dit as host

from somaspeed_patch import constants, facts, features, frozen, sites
from somaspeed_patch.groot import dit
from somaspeed_patch.testing_groot_head import ACTIONS, CONTEXT, RAGGED, WIDTH, assert_equal_steps, masks
from somaspeed_patch.testing_parity import Step, assert_as_accurate_as_native

FULL = dict(text=[4, 4, 4], images=[2, 2, 2])
LAYOUTS = {
    "full": FULL,
    "ragged text": dict(text=[4, 7, 1], images=[2, 2, 2]),
    "ragged images": dict(text=[4, 4, 4], images=[1, 3, 2]),
    "ragged": RAGGED,
    "ragged, padded left": dict(RAGGED, left=True),
    "one sample": dict(text=[5], images=[2]),
}
of_layouts = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


@pytest.fixture(autouse=True)
def feature(monkeypatch):
    on = {"modality_kv": True}
    monkeypatch.setattr(features, "value", on.get)
    sites.clear()
    yield on
    sites.clear()


def site():
    return sites.site("groot/modality_kv")


def model(dropout=0.0, layers=5, every=2, dtype=torch.float64):
    """Text, self, images, self, text."""
    torch.manual_seed(0)
    made = host.AlternateVLDiT(
        num_attention_heads=2, attention_head_dim=WIDTH // 2, output_dim=6, num_layers=layers,
        dropout=dropout, positional_embeddings=None, interleave_self_attention=True,
        cross_attention_dim=CONTEXT, attend_text_every_n_blocks=every,
    )  # fmt: skip
    return made.to(dtype)


def inputs(layout, dtype=torch.float64, grad=True):
    image, valid = masks(**layout)
    rng = torch.Generator().manual_seed(1)
    actions = torch.randn(len(image), ACTIONS, WIDTH, generator=rng)
    states = torch.randn(*image.shape, CONTEXT, generator=rng)
    return dict(
        hidden_states=actions.to(dtype).requires_grad_(grad),
        encoder_hidden_states=states.to(dtype).requires_grad_(grad),
        timestep=torch.arange(len(image)) * 100,
        encoder_attention_mask=valid,
        return_all_hidden_states=True,
        image_mask=image,
        backbone_attention_mask=valid,
    )


def native(made, **given):
    return type(made).forward(made, **given)


def hooked(made, **given):
    return dit.forward(partial(type(made).forward, made), made, (), given)


def step(call, made, layout, *, dtype=torch.float64, autocast=False, grad=True):
    """Every block's output at once as the loss, and all gradients, those of the inputs among them."""
    made.zero_grad()
    given = inputs(layout, dtype, grad)
    states = given["encoder_hidden_states"].clone()  # in the head no leaf; autocast caches a leaf's cast
    torch.manual_seed(3)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out, passed = call(made, **given | dict(encoder_hidden_states=states))
    loss = torch.cat([x.double().flatten() for x in (out, *passed)])
    loss.square().sum().backward()
    found = {name: p.grad for name, p in made.named_parameters()}
    found |= {name: given[name].grad for name in ("hidden_states", "encoder_hidden_states")}
    return Step(loss=loss.detach(), gradients=found, random_state=torch.get_rng_state(), shown={})


def served(times=1):
    return (site().calls, site().native_calls, site().fallbacks) == (times, 0, 0)


@of_layouts
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_output_and_gradients_are_the_hosts(layout, dropout):
    made = model(dropout)
    assert_equal_steps(step(native, made, layout), step(hooked, made, layout))
    assert served()


@pytest.mark.parametrize("every", [1, 2, 3])
def test_text_comes_as_often_as_the_host_has_it(every):
    made = model(layers=8, every=every)
    assert_equal_steps(step(native, made, RAGGED), step(hooked, made, RAGGED))
    assert served()


def test_each_projection_runs_on_its_own_tokens():
    made, lengths = model(layers=3), []
    for block in made.transformer_blocks[::2]:
        block.attn1.to_k.register_forward_hook(lambda module, given, out: lengths.append(out.shape[1]))
    step(hooked, made, RAGGED)
    assert lengths == [7, 6]  # text, then three images of two; natively 14 both times


@pytest.mark.parametrize("layout", [FULL, RAGGED], ids=["full", "ragged"])
def test_a_mask_only_where_samples_differ(layout):
    made, seen = model(layers=3), []
    for block in made.transformer_blocks[::2]:
        block.register_forward_pre_hook(
            lambda module, args, given: seen.append(given["encoder_attention_mask"]), with_kwargs=True
        )
    step(hooked, made, layout)
    if layout is FULL:
        assert seen == [None, None]
    else:
        assert [mask.sum(1).tolist() for mask in seen] == [[4, 7, 1], [2, 6, 4]]


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("autocast", [False, True])
def test_no_worse_than_the_host_in_lower_precision(dropout, autocast):
    made = model(dropout, dtype=torch.float32)
    theirs, ours = (
        step(call, made, RAGGED, dtype=torch.float32, autocast=autocast) for call in (native, hooked)
    )
    truth = step(native, model(dropout), RAGGED)
    for found in (truth, theirs, ours):  # a key's bias moves all of a query's scores alike: its truth is zero
        for name in [name for name in found.gradients if name.endswith("to_k.bias")]:
            del found.gradients[name]
    assert_as_accurate_as_native(truth, theirs, ours)
    assert served()


def kept(call, made, autocast):
    """Bytes that a forward keeps of tokens in autocast's dtype."""
    storages = {}

    def pack(tensor):
        is_weight = tensor.numel() == WIDTH * CONTEXT
        if tensor.dtype == torch.bfloat16 and tensor.shape[-1] == CONTEXT and not is_weight:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        step(call, made, FULL, dtype=torch.float32, autocast=autocast)
    return sum(storages.values())


def test_autocast_casts_each_modality_once():
    """The host keeps two casts of all tokens for each of its cross-attention blocks."""
    made = model(layers=9, dtype=torch.float32)
    image, valid = masks(**FULL)
    token = CONTEXT * torch.bfloat16.itemsize
    assert kept(native, made, True) == 5 * 2 * image.numel() * token
    assert kept(hooked, made, True) == int(valid.sum()) * token


@pytest.mark.parametrize("frozen_part", ["all", "blocks", "inputs"])
def test_what_is_frozen_gets_no_gradient(frozen_part):
    made = model()
    if frozen_part != "inputs":
        (made if frozen_part == "all" else made.transformer_blocks).requires_grad_(False)
    grad = frozen_part != "inputs"
    assert_equal_steps(step(native, made, RAGGED, grad=grad), step(hooked, made, RAGGED, grad=grad))
    assert served()


def test_gradient_checkpointing_is_what_the_host_makes_of_it():
    made = model(0.2)
    made.enable_gradient_checkpointing()
    assert_equal_steps(step(native, made, RAGGED), step(hooked, made, RAGGED))
    assert served()


def test_evaluation_mode_with_gradients():
    made = model(0.2).eval()
    assert_equal_steps(step(native, made, RAGGED), step(hooked, made, RAGGED))


def test_without_all_hidden_states():
    made, given = model(), inputs(RAGGED) | dict(return_all_hidden_states=False)
    torch.testing.assert_close(hooked(made, **given), native(made, **given), rtol=1e-12, atol=1e-12)


def on_meta(given):
    return {name: x.detach().to("meta") if isinstance(x, torch.Tensor) else x for name, x in given.items()}


@pytest.mark.parametrize("layout", [FULL, RAGGED], ids=["full", "ragged"])
def test_the_device_is_never_asked(layout, monkeypatch):
    """On the meta device there is nothing to read: a wait for values would raise."""
    monkeypatch.setattr(constants, "on", lambda device, values: values.to(device))
    monkeypatch.setattr(frozen, "autocast_dtype", lambda device: None)  # torch refuses to say for meta
    made, given = model().to("meta"), inputs(layout)
    on_device = on_meta(given)
    for name in ("image_mask", "backbone_attention_mask"):
        facts.moved(given[name], on_device[name])
    states = on_device["encoder_hidden_states"].requires_grad_()
    out, _ = hooked(made, **on_device)
    out.sum().backward()
    assert states.grad.shape == states.shape
    assert served() and out.shape == (3, ACTIONS, 6)


@pytest.mark.parametrize("known", ["image_mask", "backbone_attention_mask"])
def test_without_both_twins_the_host_serves(known):
    made, given = model().to("meta"), inputs(RAGGED)
    on_device = on_meta(given)
    facts.moved(given[known], on_device[known])
    assert hooked(made, **on_device)[0].shape == (3, ACTIONS, 6)
    assert (site().calls, site().reason) == (0, "the tokens' modalities are only on the device")


@pytest.mark.parametrize(
    "layout, kind", [(dict(text=[4, 4], images=[1, 0]), "image"), (dict(text=[4, 0], images=[1, 1]), "text")]
)
def test_a_sample_without_a_modality_is_left_to_the_host(layout, kind):
    made, given = model(), inputs(dict(text=[4, 4], images=[1, 1]))
    image, valid = given["image_mask"], given["backbone_attention_mask"].clone()
    valid[1] &= image[1] if kind == "text" else ~image[1]
    given |= dict(backbone_attention_mask=valid)
    assert torch.equal(hooked(made, **given)[0], native(made, **given)[0])
    assert (site().calls, site().reason) == (0, f"a sample has no {kind} token")


@pytest.mark.parametrize("missing", ["image_mask", "backbone_attention_mask"])
def test_a_missing_mask_raises_the_hosts_error(missing):
    with pytest.raises(ValueError, match=f"{missing} is required"):
        hooked(model(), **inputs(RAGGED) | {missing: None})
    assert site().fallbacks == 0


def test_masks_of_another_kind_are_left_to_the_host():
    made, given = model(), inputs(RAGGED)
    given["backbone_attention_mask"] = given["backbone_attention_mask"].long()
    with pytest.raises(RuntimeError) as theirs:
        native(made, **given)
    with pytest.raises(RuntimeError) as ours:
        hooked(made, **given)
    assert str(ours.value) == str(theirs.value) and site().fallbacks == 0


def test_blocks_that_do_not_interleave_raise_the_hosts_error():
    made = model()
    made.register_to_config(interleave_self_attention=False)
    with pytest.raises(ValueError, match="interleave_self_attention=True"):
        hooked(made, **inputs(RAGGED))
    assert site().fallbacks == 0


def test_off_and_without_gradient_the_host_serves(feature):
    made, given = model(), inputs(RAGGED)
    with torch.no_grad():
        assert torch.equal(hooked(made, **given)[0], native(made, **given)[0])
    assert site().native_calls == 0
    feature["modality_kv"] = False
    assert torch.equal(hooked(made, **given)[0], native(made, **given)[0])
    assert (site().calls, site().native_calls, site().reason) == (0, 1, "modality_kv is off")


@of_layouts
def test_places_are_the_chosen_and_fill_with_others(layout):
    image, valid = masks(**layout)
    for chosen in (image & valid, ~image & valid):
        positions, mask = dit.places(chosen)
        most = int(chosen.sum(1).max())
        assert positions.shape == (len(chosen) * most,)
        assert torch.equal(positions, positions.unique())
        assert torch.equal(
            positions.view(-1, most) // chosen.shape[1], torch.arange(len(chosen))[:, None].expand(-1, most)
        )
        assert (mask is None) == (len(set(chosen.sum(1).tolist())) == 1)
        picked = positions if mask is None else positions[mask.flatten()]
        assert torch.equal(picked, chosen.flatten().nonzero().flatten())
