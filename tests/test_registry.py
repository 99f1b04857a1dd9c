"""apply and revert on every kind of target, all or none, and never over somebody else's patch."""

import sys
import types

import pytest
import wrapt

from somaspeed_patch import registry
from somaspeed_patch.registry import Patch

HOST = """
class Base:
    def step(self): return "base"
class Sub(Base):
    @staticmethod
    def plain(x): return x
    @classmethod
    def named(cls, x): return (cls.__name__, x)
    class Inner:
        def f(self): return 1
def fn(a, b): return a + b
"""
TARGETS = ["fn", "Sub.step", "Sub.plain", "Sub.named", "Sub.Inner.f", "Base.step"]


@pytest.fixture
def host(monkeypatch):
    module = types.ModuleType("somaspeed_host_for_tests")
    exec(HOST, module.__dict__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    yield module
    registry._ledger.clear()


def patch_of(name, make=lambda original: staticmethod(lambda *args: "patched")):
    return Patch(module="somaspeed_host_for_tests", name=name, make=make)


def snapshot(module):
    return {kind: dict(vars(kind)) for kind in (module.Base, module.Sub, module.Sub.Inner)} | {
        "fn": module.fn
    }


@pytest.mark.parametrize("name", TARGETS)
def test_a_round_trip_leaves_no_trace(host, name):
    before = snapshot(host)
    registry.apply("a", [patch_of(name)])
    assert snapshot(host) != before
    registry.revert("a")
    assert snapshot(host) == before


def test_an_inherited_method_is_shadowed_and_then_inherited_again(host):
    registry.apply("a", [patch_of("Sub.step", lambda original: lambda self: original(self) + "!")])
    assert (host.Sub().step(), host.Base().step()) == ("base!", "base")
    registry.revert("a")
    assert "step" not in vars(host.Sub)


def test_the_first_failure_undoes_the_others(host):
    before = snapshot(host)
    with pytest.raises(AttributeError):
        registry.apply("a", [patch_of("fn"), patch_of("gone")])
    assert snapshot(host) == before
    assert registry._ledger == []


def test_a_make_that_raises_undoes_the_others(host):
    def refuse(original):
        registry.with_parameters(original, ["a", "c"])

    before = snapshot(host)
    with pytest.raises(AttributeError, match=r"fn takes \(a, b\), expected \(a, c\)"):
        registry.apply("a", [patch_of("Sub.plain"), patch_of("fn", refuse)])
    assert snapshot(host) == before


def test_parameters_that_a_later_host_adds_are_optional_by_name(host):
    registry.with_parameters(host.fn, ["a", "b"], optional=["c"])
    registry.with_parameters(host.fn, ["a"], optional=["b"])
    with pytest.raises(AttributeError, match=r"fn takes \(a, b\), expected \(a\)"):
        registry.with_parameters(host.fn, ["a"], optional=["c"])


def test_somebody_elses_patch_stops_the_whole_revert(host):
    registry.apply("a", [patch_of("fn"), patch_of("Base.step")])
    patched_step = vars(host.Base)["step"]
    host.fn = lambda: 3
    with pytest.raises(RuntimeError, match=r"somaspeed_host_for_tests\.fn was patched again"):
        registry.revert("a")
    assert host.fn() == 3
    assert vars(host.Base)["step"] is patched_step  # nothing was half undone


def test_one_owner_is_reverted_without_the_other(host):
    registry.apply("a", [patch_of("fn")])
    registry.apply("b", [patch_of("Base.step")])
    fn, step = host.fn, vars(host.Base)["step"]
    registry.revert("a")
    assert host.fn is not fn
    assert vars(host.Base)["step"] is step


def test_two_patches_of_one_name_by_one_owner_come_off_together(host):
    before = snapshot(host)
    registry.apply("a", [patch_of("fn"), patch_of("fn", lambda original: lambda: ("twice", original()))])
    assert host.fn() == ("twice", "patched")
    registry.revert("a")
    assert snapshot(host) == before


def tagged(tag):
    return patch_of("fn", lambda original: lambda *args: (tag, original(*args)))


@pytest.mark.parametrize("order", ["abc", "acb", "bac", "bca", "cab", "cba"])
def test_owners_of_one_name_come_off_in_any_order(host, order):
    before = snapshot(host)
    for owner in "abc":
        registry.apply(owner, [tagged(owner)])
    assert host.fn(1, 2) == ("c", ("b", ("a", 3)))
    left = "abc"
    for owner in order:
        registry.revert(owner)
        left = left.replace(owner, "")
        expected = 3
        for tag in left:
            expected = (tag, expected)
        assert host.fn(1, 2) == expected
    assert snapshot(host) == before
    assert registry._ledger == []


def test_an_owner_below_others_is_not_taken_out_from_under_somebody_else(host):
    registry.apply("a", [tagged("a")])
    registry.apply("b", [tagged("b")])
    host.fn = lambda *args: "foreign"
    with pytest.raises(RuntimeError, match="was patched again by someone else"):
        registry.revert("a")
    assert host.fn() == "foreign" and len(registry._ledger) == 2


def test_a_plain_function_over_a_wrapt_proxy_hands_on_the_instance(host):
    """What a scheduler or accelerate does: take `__func__`, and call it with the instance."""
    seen = []

    def proxied(wrapped, instance, args, kwargs):
        seen.append(instance)
        return wrapped(*args, **kwargs)

    def plain(wrapped, instance, args, kwargs):
        return (instance, wrapped(*args, **kwargs))

    with_proxy = patch_of("Sub.Inner.f", lambda original: wrapt.FunctionWrapper(original, proxied))
    on_top = patch_of("Sub.Inner.f", lambda original: registry.function(original, plain))
    registry.apply("one", [with_proxy])
    registry.apply("two", [on_top])
    inner = host.Sub.Inner()
    assert inner.f() == (inner, 1) == inner.f.__func__(inner)
    assert seen == [inner, inner]
