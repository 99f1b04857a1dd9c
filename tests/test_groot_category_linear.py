"""GR00T's CategorySpecificLinear, one matmul a category, against the host's own class."""

from functools import partial

import pytest
import torch
from lerobot.policies.groot import groot_n1_7 as host
from torch import nn

from somaspeed_patch import constants, facts, features, frozen, sites
from somaspeed_patch.groot import category_linear

CATEGORIES, SAMPLES, STEPS, INPUT, OUTPUT = 6, 7, 3, 10, 8
BATCHES = {
    "one": [4] * SAMPLES,
    "three": [5, 0, 3, 0, 5, 5, 0],
    "sorted": [1, 1, 2, 2, 2, 4, 4],
    "first and last": [5, 0, 0, 0, 0, 0, 0],
}
of_batches = pytest.mark.parametrize("ids", BATCHES.values(), ids=BATCHES)


@pytest.fixture(autouse=True)
def feature(monkeypatch):
    on = {"category_linear": True}
    monkeypatch.setattr(features, "value", on.get)
    sites.clear()
    yield on
    sites.clear()


def site():
    return sites.site("groot/category_linear")


def linear(dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    module = host.CategorySpecificLinear(CATEGORIES, INPUT, OUTPUT)
    nn.init.normal_(module.b)
    return module.to(dtype)


def native(module, x, ids):
    return host.CategorySpecificLinear.forward(module, x, ids)


def hooked(module, x, ids):
    wrapped = partial(host.CategorySpecificLinear.forward, module)
    return category_linear.forward(wrapped, module, (x,), {"cat_ids": ids})


def numbers(rng, *shape):
    """What every dtype holds exactly, so that all of a test's steps start from the same."""
    return torch.randn(shape, generator=rng).bfloat16()


def result(call, module, ids, *, autocast=False, x_grad=True):
    """The output, its dtype, and the gradients of x, W and b under one upstream gradient."""
    module.zero_grad()
    rng, dtype = torch.Generator().manual_seed(1), module.W.dtype
    x = numbers(rng, len(ids), STEPS, INPUT).to(dtype).requires_grad_(x_grad)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = call(module, x, torch.as_tensor(ids))
    if out.requires_grad:
        out.backward(numbers(rng, *out.shape).to(out.dtype))
    return {"out": out.detach(), "x": x.grad, "W": module.W.grad, "b": module.b.grad}


def assert_equal(theirs, ours):
    assert (site().calls, site().native_calls, site().fallbacks) == (1, 0, 0)
    for name, expected in theirs.items():
        found = ours[name]
        assert (found is None) == (expected is None), name
        if expected is not None:
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12, msg=name)


def assert_no_worse(exact, theirs, ours):
    """At most twice as far from the exact numbers as the host, which a unit in the last place is added to."""
    for name, truth in exact.items():
        mine, native_error = ((found[name] - truth).abs().max() for found in (ours, theirs))
        assert ours[name].dtype == theirs[name].dtype, name
        assert mine <= 2 * native_error + torch.finfo(theirs[name].dtype).eps * truth.abs().max(), name


@of_batches
def test_output_and_gradients_are_the_hosts(ids):
    module = linear()
    assert_equal(result(native, module, ids), result(hooked, module, ids))


@of_batches
@pytest.mark.parametrize(
    "dtype, autocast", [(torch.float32, False), (torch.bfloat16, False), (torch.float32, True)], ids=str
)
def test_no_worse_than_the_host_in_lower_precision(ids, dtype, autocast):
    module = linear(dtype)
    exact = result(native, linear(dtype).double(), ids)
    theirs = result(native, module, ids, autocast=autocast)
    assert_no_worse(exact, theirs, result(hooked, module, ids, autocast=autocast))
    assert site().calls == 1


@of_batches
def test_autocast_leaves_double_alone(ids):
    module = linear()
    assert_equal(result(native, module, ids, autocast=True), result(hooked, module, ids, autocast=True))


@of_batches
@pytest.mark.parametrize("trains", [(False, True), (True, False), (False, False)], ids=str)
@pytest.mark.parametrize("x_grad", [True, False])
def test_what_is_frozen_gets_no_gradient(ids, trains, x_grad):
    module = linear()
    module.W.requires_grad_(trains[0])
    module.b.requires_grad_(trains[1])
    assert_equal(result(native, module, ids, x_grad=x_grad), result(hooked, module, ids, x_grad=x_grad))


def test_absent_categories_get_zeros():
    module = linear()
    found = result(hooked, module, BATCHES["three"])
    for absent in (1, 2, 4):
        assert not found["W"][absent].any() and not found["b"][absent].any()
    assert all(found["W"][present].any() for present in (0, 3, 5))


def test_strided_inputs_and_gradients():
    """What the head hands over is a slice of a longer sequence; a sum's gradient is expanded."""
    module = linear()
    ids = torch.tensor(BATCHES["three"])
    long = torch.randn(SAMPLES, 2 * STEPS, INPUT, dtype=torch.float64)

    def step(call):
        module.zero_grad()
        x = long.clone().requires_grad_()
        call(module, x[:, ::2], ids).sum().backward()
        return x.grad, module.W.grad, module.b.grad

    for expected, found in zip(step(native), step(hooked), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def kept(call, module, ids):
    """Bytes of what a forward keeps for its backward, beside the module's own parameters."""
    mine = {p.untyped_storage().data_ptr() for p in module.parameters()}
    storages = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in mine:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = result(call, module, ids)["out"]
    return sum(storages.values()), out.element_size()


@pytest.mark.parametrize("ids", [BATCHES["one"], BATCHES["three"]], ids=["one", "three"])
def test_no_copy_of_the_weight_is_kept(ids):
    module = linear()
    copies = SAMPLES * INPUT * OUTPUT
    native_bytes, size = kept(native, module, ids)
    assert native_bytes >= copies * size
    assert kept(hooked, module, ids)[0] <= (SAMPLES * STEPS * INPUT + SAMPLES) * 8  # x, and the ids


def test_the_whole_encoder(monkeypatch):
    """MultiEmbodimentActionEncoder: three layers that share one batch's grouping."""
    torch.manual_seed(0)
    encoder = host.MultiEmbodimentActionEncoder(INPUT, OUTPUT, CATEGORIES).double()
    actions = torch.randn(SAMPLES, STEPS, INPUT, dtype=torch.float64)
    times, ids = torch.arange(SAMPLES), torch.tensor(BATCHES["three"])

    def step():
        encoder.zero_grad()
        out = encoder(actions, times, ids)
        out.square().sum().backward()
        return [out.detach(), *(p.grad.clone() for p in encoder.parameters())]

    theirs = step()
    computed = []
    original, grouped = host.CategorySpecificLinear.forward, category_linear._grouping
    monkeypatch.setattr(category_linear, "_grouping", lambda ids: computed.append(ids) or grouped(ids))
    monkeypatch.setattr(
        host.CategorySpecificLinear,
        "forward",
        lambda self, *args: category_linear.forward(partial(original, self), self, args, {}),
    )
    for expected, found in zip(theirs, step(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert (site().calls, len(computed)) == (3, 1)


def test_a_batch_written_into_is_grouped_anew():
    ids = torch.tensor(BATCHES["three"])
    assert category_linear.grouping(ids) is category_linear.grouping(ids)
    ids[:] = 2
    assert [category for category, _ in category_linear.grouping(ids).groups] == [2]


@of_batches
def test_the_device_is_never_asked(ids, monkeypatch):
    """On the meta device there is nothing to read: a wait for values would raise."""
    monkeypatch.setattr(constants, "on", lambda device, values: values.to(device))
    monkeypatch.setattr(frozen, "autocast_dtype", lambda device: None)  # torch refuses to say for meta
    module, ids = linear().to("meta"), torch.tensor(ids)
    x = torch.empty(SAMPLES, STEPS, INPUT, dtype=torch.float64, device="meta", requires_grad=True)
    on_device = ids.to("meta")
    facts.moved(ids, on_device)
    out = hooked(module, x, on_device)
    out.sum().backward()
    assert site().calls == 1
    assert out.shape == (SAMPLES, STEPS, OUTPUT) and x.grad.shape == x.shape
    assert module.W.grad.shape == module.W.shape and module.b.grad.shape == module.b.shape


def test_without_a_twin_the_host_serves():
    module = linear().to("meta")
    x = torch.empty(SAMPLES, STEPS, INPUT, dtype=torch.float64, device="meta")
    assert hooked(module, x, torch.zeros(SAMPLES, dtype=torch.long, device="meta")).shape[2] == OUTPUT
    assert (site().native_calls, site().reason) == (1, "the embodiments are only on the device")


def x_of(samples=SAMPLES, dtype=torch.float64):
    return torch.randn(samples, STEPS, INPUT, dtype=dtype)


def test_negative_categories_are_left_to_the_host():
    module, x, ids = linear(), x_of(3), torch.tensor([-1, 0, 2])
    assert torch.equal(hooked(module, x, ids), native(module, x, ids))
    assert site().reason == "a category is not one of 0 to 5"


@pytest.mark.parametrize(
    "x, ids, error",
    [
        (x_of(3), torch.tensor([0, 6, 1]), IndexError),
        (x_of(3), torch.tensor([6, 6, 6]), IndexError),
        (x_of(2), torch.tensor([0, 1, 1]), RuntimeError),
        (x_of(2)[..., :4], torch.tensor([0, 1]), RuntimeError),
        (x_of(2, torch.float32), torch.tensor([0, 1]), RuntimeError),
        (x_of(2, torch.float32), torch.tensor([1, 1]), RuntimeError),
        (x_of(2)[0], torch.tensor([1, 1]), RuntimeError),
    ],
)
def test_wrong_inputs_raise_the_hosts_error(x, ids, error):
    module = linear()
    with pytest.raises(error) as theirs:
        native(module, x, ids)
    with pytest.raises(error) as ours:
        hooked(module, x, ids)
    assert str(ours.value) == str(theirs.value)
    assert (site().calls, site().fallbacks) == (0, 0)
    hooked(module, x_of(), torch.tensor(BATCHES["three"]))
    assert site().calls == 1  # and ours serves the next batch


@pytest.mark.parametrize(
    "ids, why",
    [
        (torch.tensor([True, False, True]), "the embodiments are torch.bool [3], not integers [B]"),
        (torch.tensor([[1], [2]]), "the embodiments are torch.int64 [2, 1], not integers [B]"),
        (torch.tensor(1), "the embodiments are torch.int64 [], not integers [B]"),
        (torch.empty(0, dtype=torch.long), "the embodiments are torch.int64 [0], not integers [B]"),
    ],
)
def test_other_indices_are_declined(ids, why):
    served = []
    module = linear()
    category_linear.forward(lambda *given: served.append(given), module, (x_of(), ids), {})
    assert len(served) == 1 and site().reason == why


def test_a_weight_that_is_no_plain_parameter_is_declined():
    class Sharded(nn.Parameter):
        pass

    module, x, ids = linear(), x_of(3), torch.tensor([0, 1, 1])
    module.W = Sharded(module.W.detach())
    assert torch.equal(hooked(module, x, ids), native(module, x, ids))
    assert site().reason == "the weight is a Sharded, not a plain parameter"


def test_off_and_without_gradient_the_host_serves(feature):
    module, x, ids = linear(), x_of(3), torch.tensor([0, 1, 1])
    with torch.no_grad():
        assert torch.equal(hooked(module, x, ids), native(module, x, ids))
    assert site().native_calls == 0
    feature["category_linear"] = None
    assert torch.equal(hooked(module, x, ids), native(module, x, ids))
    assert (site().calls, site().native_calls, site().reason) == (0, 1, "category_linear is off")


def test_int32_categories():
    module, ids = linear(), torch.tensor(BATCHES["three"], dtype=torch.int32)
    assert_equal(result(native, module, ids), result(hooked, module, ids))


def test_a_second_derivative_is_refused_not_wrong():
    module, x = linear(), x_of(3).requires_grad_()
    out = hooked(module, x, torch.tensor([0, 1, 1]))
    (gradient,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@pytest.mark.parametrize("ids", [[1] * 64, [1] * 60 + [2] * 4], ids=["one", "two"])
def test_samples_that_agree_lose_nothing_to_one_rounding(ids):
    """Under autocast the host rounds each sample's gradient to bf16 and adds in fp32: errors average out."""

    def weight_gradient(call, module, autocast):
        rng = torch.Generator().manual_seed(2)
        x, upstream = numbers(rng, 1, STEPS, INPUT), numbers(rng, 1, STEPS, OUTPUT)
        dtype, few = module.W.dtype, torch.rand(len(ids), 1, 1, generator=rng) + 0.5
        module.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = call(module, (x * few.bfloat16()).to(dtype), torch.tensor(ids))
        out.backward(upstream.expand_as(out).to(out.dtype))
        return {"W": module.W.grad}

    module = linear(torch.float32)
    exact = weight_gradient(native, linear(torch.float32).double(), False)
    theirs = weight_gradient(native, module, True)
    assert_no_worse(exact, theirs, weight_gradient(hooked, module, True))
