"""patch(), unpatch(), report() and patched() on a host made for the test."""

import dataclasses
import json
import logging
import os
import sys
import types
from pathlib import Path

import pytest
import wrapt

import somaspeed_patch
from somaspeed_patch import adapter as adapter_module
from somaspeed_patch import features, patching, registry, sites
from somaspeed_patch.adapter import Adapter
from somaspeed_patch.features import Feature
from somaspeed_patch.registry import Patch

HOST = "somaspeed_host_for_tests"


def double(original):
    def wrapper(wrapped, instance, args, kwargs):
        sites.site("toy/answer").ran()
        return wrapped(*args, **kwargs) * (2 if features.value("twice") else 1)

    return wrapt.FunctionWrapper(original, wrapper)


def toy(**changes):
    fields = dict(
        name="toy",
        requires=("pytest>=7",),
        patches=(Patch(module=HOST, name="answer", make=double),),
        features=(Feature(name="twice", changes="doubles", exact=True, default=True),),
    )
    return Adapter(**{**fields, **changes})


@pytest.fixture
def use(monkeypatch):
    """Install a set of adapters in place of the package's own."""

    def install(*chosen):
        table = {one.name: one for one in chosen}
        monkeypatch.setattr(patching, "adapters", lambda: table)

    monkeypatch.delenv(patching.ENVIRONMENT, raising=False)
    state = (dict(patching._active), set(patching._hooked), list(registry._ledger), dict(sites._sites))
    values = features.values()
    patching._active.clear()
    features.reset()
    sites.clear()
    yield install
    os.environ.pop(patching.ENVIRONMENT, None)  # before monkeypatch restores what was there
    registry.revert("toy")
    patching._active.clear()
    patching._active.update(state[0])
    patching._environment_before.clear()
    features.reset()
    features.assign(values)
    sites.clear()
    sites._sites.update(state[3])


@pytest.fixture
def host(monkeypatch):
    module = types.ModuleType(HOST)
    module.answer = lambda: 21
    monkeypatch.setitem(sys.modules, HOST, module)
    return module


def test_patch_changes_the_host_and_unpatch_restores_it(use, host):
    use(toy())
    before = dict(vars(host))
    somaspeed_patch.patch()
    assert host.answer() == 42
    somaspeed_patch.unpatch()
    assert vars(host) == before


def test_patching_twice_is_patching_once(use, host):
    use(toy())
    somaspeed_patch.patch()
    first = host.answer
    somaspeed_patch.patch("toy")
    assert host.answer is first


def test_a_feature_takes_effect_at_the_next_call(use, host):
    use(toy())
    somaspeed_patch.patch()
    somaspeed_patch.patch(twice=False)
    assert host.answer() == 21


def test_the_report_counts_calls_and_names_the_place(use, host):
    use(toy())
    somaspeed_patch.patch()
    host.answer()
    host.answer()
    found = {site["site"]: site for site in somaspeed_patch.report().to_dict()["sites"]}
    assert found["toy/answer"]["calls"] == 2
    assert found["toy/answer"]["target"] == f"{HOST}:answer"
    assert found["toy/answer"]["status"] == "patched"


def test_a_switched_off_feature_is_native_in_the_report(use, host):
    use(toy())
    shown = {site.site: (site.status, site.reason) for site in somaspeed_patch.patch(twice=False).sites}
    assert shown["toy/twice"] == ("native", "off")
    shown = {site.site: (site.status, site.reason) for site in somaspeed_patch.patch(twice=True).sites}
    assert shown["toy/twice"] == ("patched", "")


def test_a_host_imported_later_is_patched_at_its_import(use, tmp_path, monkeypatch):
    late = "somaspeed_late_host_for_tests"
    (tmp_path / f"{late}.py").write_text("def answer():\n    return 21\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    use(toy(patches=(Patch(module=late, name="answer", make=double),)))
    report = somaspeed_patch.patch()
    assert [(s.status, s.reason) for s in report.sites if s.site == "toy/answer"] == [
        ("waiting", f"applies when {late} is imported")
    ]
    module = __import__(late)
    assert module.answer() == 42
    somaspeed_patch.unpatch()
    assert module.answer() == 21
    del sys.modules[late]
    assert __import__(late).answer() == 21  # imported after unpatch: left alone


def test_patching_again_forgets_that_it_was_unpatched(use, host):
    use(toy())
    somaspeed_patch.patch()
    somaspeed_patch.unpatch()
    shown = {s.site: (s.status, s.reason) for s in somaspeed_patch.report().sites}
    assert shown["toy/twice"] == ("native", "unpatched")
    shown = {s.site: (s.status, s.reason) for s in somaspeed_patch.patch().sites}
    assert shown["toy/twice"] == shown["toy/answer"] == ("patched", "")


def test_an_unfit_host_is_left_native_with_one_warning(use, host, caplog):
    use(toy(requires=("pytest<1",)))
    with caplog.at_level(logging.WARNING):
        report = somaspeed_patch.patch()
    assert host.answer() == 21
    assert [r.message for r in caplog.records] == [
        f"toy: needs pytest<1, found {pytest.__version__}; left native"
    ]
    assert {s.status for s in report.sites} == {"native"}


def test_an_unfit_host_named_explicitly_raises(use, host):
    use(toy(requires=("pytest<1",)))
    with pytest.raises(ValueError, match=r"toy: needs pytest<1, found .*; patch\(\) leaves it native"):
        somaspeed_patch.patch("toy")


def test_a_host_that_is_not_installed_is_no_warning(use, caplog):
    use(toy(requires=("no-such-distribution>=1",)))
    with caplog.at_level(logging.WARNING):
        report = somaspeed_patch.patch()
    assert caplog.records == []
    assert "no-such-distribution is not installed" in report.sites[0].reason


def test_an_unfit_host_of_an_optional_adapter_is_no_warning(use, caplog):
    use(toy(requires=("pytest<1",), optional=True))
    with caplog.at_level(logging.WARNING):
        report = somaspeed_patch.patch()
    assert caplog.records == []
    assert report.sites[0].status == "native" and report.sites[0].reason.startswith("needs pytest<1")


def test_a_missing_symbol_leaves_the_whole_adapter_native(use, host):
    gone = Patch(module=HOST, name="gone", make=double)
    use(toy(patches=(*toy().patches, gone)))
    before = dict(vars(host))
    report = somaspeed_patch.patch()
    assert vars(host) == before
    assert {s.status for s in report.sites} == {"native"}
    assert "gone" in report.sites[0].reason


def test_a_missing_symbol_named_explicitly_raises_and_changes_nothing(use, host):
    gone = Patch(module=HOST, name="gone", make=double)
    use(toy(patches=(*toy().patches, gone)))
    before = dict(vars(host))
    with pytest.raises(ValueError, match="is not as expected"):
        somaspeed_patch.patch("toy", twice=False)
    assert vars(host) == before
    assert features.value("twice") is True


def test_unknown_names_are_refused_with_the_valid_ones(use, host):
    use(toy())
    with pytest.raises(ValueError, match="no target is called 'tou'; did you mean toy"):
        somaspeed_patch.patch("tou")
    with pytest.raises(ValueError, match="no feature is called 'twicee'; did you mean twice"):
        somaspeed_patch.patch(twicee=True)
    with pytest.raises(ValueError, match="feature twice must be True or False, but is 'yes'"):
        somaspeed_patch.patch(twice="yes")
    with pytest.raises(ValueError, match="no target is called"):
        somaspeed_patch.unpatch("nobody")


def test_a_feature_of_an_adapter_that_is_off_is_refused(use, host):
    other = toy(
        name="other", features=(Feature(name="trace", changes="-", exact=True, default=None),), default=False
    )
    use(toy(), other)
    with pytest.raises(ValueError, match='feature trace belongs to "other"'):
        somaspeed_patch.patch(trace="x")


def test_patched_restores_what_was_before(use, host):
    use(toy())
    with somaspeed_patch.patched("toy", twice=False):
        assert host.answer() == 21
    assert not patching.active()
    somaspeed_patch.patch()
    with somaspeed_patch.patched(twice=False):
        assert host.answer() == 21
    assert host.answer() == 42


def test_a_foreign_patch_stops_the_whole_unpatch(use, host, monkeypatch):
    second = types.ModuleType("somaspeed_second_host_for_tests")
    second.answer = lambda: 1
    monkeypatch.setitem(sys.modules, second.__name__, second)
    other = toy(
        name="other", patches=(Patch(module=second.__name__, name="answer", make=double),), features=()
    )
    use(toy(), other)
    somaspeed_patch.patch()
    ours, theirs = second.answer, lambda: 5
    second.answer = theirs
    with pytest.raises(RuntimeError, match="answer was patched again by someone else"):
        somaspeed_patch.unpatch()
    assert host.answer() == 42  # the first adapter is still on, too
    second.answer = ours
    somaspeed_patch.unpatch()
    assert (host.answer(), second.answer()) == (21, 1)


def test_children_are_told_through_the_environment(use, host, monkeypatch):
    use(toy())
    monkeypatch.setenv(patching.ENVIRONMENT, "1")
    somaspeed_patch.patch(twice=False)
    assert json.loads(os.environ[patching.ENVIRONMENT]) == {"targets": ["toy"], "features": {"twice": False}}
    somaspeed_patch.unpatch()
    assert os.environ[patching.ENVIRONMENT] == "1"


def test_children_are_not_told_of_features_whose_adapter_is_off(use, host):
    other = toy(
        name="other",
        patches=(),
        features=(Feature(name="trace", changes="-", exact=True, default=None),),
        default=False,
    )
    use(toy(), other)
    somaspeed_patch.patch("toy")
    assert json.loads(os.environ[patching.ENVIRONMENT])["features"] == {"twice": True}


def test_an_inexact_feature_may_not_be_on_by_default():
    with pytest.raises(ValueError, match="its default must be off"):
        Feature(name="risky", changes="rounds", exact=False, default=True)


def test_a_saved_report_reads_back_and_prints_its_fallback(use, host, tmp_path):
    use(toy())
    somaspeed_patch.patch()
    sites.site("toy/answer").failed(RuntimeError("no kernel"))
    somaspeed_patch.report().save(tmp_path / "report.json")
    loaded = somaspeed_patch.Report.load(tmp_path / "report.json")
    assert loaded.to_dict() == somaspeed_patch.report().to_dict()
    assert "fell back: RuntimeError: no kernel" in str(loaded)
    assert [p.name for p in tmp_path.iterdir()] == ["report.json"]


def test_a_long_reason_is_printed_once(use, host):
    use(toy(requires=("no-such-distribution>=1",), features=()))
    report = somaspeed_patch.patch()
    second = dataclasses.replace(report.sites[0], site="toy/second")
    printed = str(dataclasses.replace(report, sites=(report.sites[0], second))).splitlines()
    assert printed[1].endswith("needs no-such-distribution>=1, but no-such-distribution is not installed")
    assert printed[2].endswith("(same)")


def test_the_readme_lists_every_feature_with_its_default():
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    shown = {True: "on", False: "off", None: "none"}
    for one in adapter_module.adapters().values():
        for feature in one.features:
            row = next(line for line in readme.splitlines() if line.startswith(f"| `{feature.name}` |"))
            exact = "yes" if feature.exact else "no"
            assert row.endswith(f"| {exact} | {shown[feature.default]} |"), row


def test_every_shipped_adapter_loads_and_names_its_features_once():
    loaded = adapter_module.adapters()
    distinct = {feature for one in loaded.values() for feature in one.features}  # some are shared
    names = [feature.name for feature in distinct]
    assert {"pi05", "lerobot_train"} <= set(loaded)
    assert len(names) == len(set(names))
