"""Our code in a host's place: who serves a call, with which random numbers, and what is remembered."""

import gc
import weakref

import pytest
import torch
from torch import nn

from somaspeed_patch import guarded
from somaspeed_patch.guarded import Declined
from somaspeed_patch.sites import Site


@pytest.fixture
def site():
    return Site(site="somewhere/here", target="host.f")


@pytest.fixture
def model():
    return nn.Linear(1, 1)


def hosts(x, scale=1):
    return ("host", x * scale, torch.rand(3))


def serve(site, model, ours):
    torch.manual_seed(0)
    return guarded.or_hosts(site, model, ours, hosts, (2,), {"scale": 3})


def as_the_host_alone(found):
    torch.manual_seed(0)
    expected = hosts(2, scale=3)
    return found[:2] == expected[:2] and torch.equal(found[2], expected[2])


def test_ours_serves_with_the_callers_arguments(site, model):
    assert serve(site, model, lambda x, scale: ("ours", x * scale)) == ("ours", 6)
    assert (site.calls, site.native_calls, site.fallbacks) == (1, 0, 0)
    assert guarded.why_not(model, site.site) is None


def test_a_refusal_is_the_hosts_call_and_nothing_is_remembered(site, model):
    def ours(x, scale):
        torch.rand(5)
        raise Declined("not this batch")

    assert as_the_host_alone(serve(site, model, ours))
    assert (site.calls, site.native_calls, site.fallbacks) == (0, 1, 0)
    assert site.reason == "not this batch"
    assert guarded.why_not(model, site.site) is None


def test_a_failure_is_the_hosts_call_with_the_same_random_numbers_and_is_remembered(site, model, caplog):
    def ours(x, scale):
        torch.rand(5)
        raise KeyError("gone")

    assert as_the_host_alone(serve(site, model, ours))
    assert (site.calls, site.native_calls, site.fallbacks) == (0, 0, 1)
    assert site.last_fallback == "KeyError: 'gone'"
    assert guarded.why_not(model, site.site) == "failed once and stays native: KeyError: 'gone'"
    assert guarded.why_not(nn.Linear(1, 1), site.site) is None
    assert guarded.why_not(model, "somewhere/else") is None
    assert "somewhere/here failed, this model stays native there" in caplog.text


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyboardInterrupt])
def test_what_the_host_could_not_do_better_is_raised(site, model, error):
    def ours(x, scale):
        raise error

    with pytest.raises(error):
        serve(site, model, ours)
    assert (site.calls, site.native_calls, site.fallbacks) == (0, 0, 0)
    assert guarded.why_not(model, site.site) is None


def test_release_gives_the_sites_of_one_adapter_another_try(site, model):
    def ours(x, scale):
        raise KeyError("gone")

    other = Site(site="elsewhere/here", target="host.g")
    for each in (site, other):
        serve(each, model, ours)
    guarded.release("somewhere")
    assert guarded.why_not(model, site.site) is None
    assert guarded.why_not(model, other.site) is not None
    guarded.release("elsewhere")


def test_a_model_that_failed_can_be_collected(site, monkeypatch):
    def ours(x, scale):
        raise KeyError("gone")

    model = nn.Linear(1, 1)
    monkeypatch.setattr(guarded.log, "disabled", True)  # pytest keeps records, with tracebacks and the model
    serve(site, model, ours)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_an_error_of_the_host_itself_is_the_callers(site, model):
    def both(x, scale):
        raise ValueError("bad batch")

    with pytest.raises(ValueError, match="bad batch"):
        guarded.or_hosts(site, model, both, both, (2,), {"scale": 3})
