"""Cached features: what goes in comes out, and what does not belong is refused; digests of weights."""

import pytest
import torch

from somaspeed_patch.rl import features
from somaspeed_patch.rl.digest import Watch, digest
from somaspeed_patch.rl.features import Features, Tag

TAG = Tag(model="m", backbone="b")


def made(lengths=(3, 1, 2), seed=0):
    rng = torch.Generator().manual_seed(seed)
    tokens = torch.randn(2, len(lengths), max(lengths), 4, generator=rng)
    return Features(
        tokens={"key": tokens, "seen": tokens[..., 0] > 0},
        length=torch.tensor(lengths, dtype=torch.int32),
        fixed={"pooled": torch.randn(len(lengths), 5, generator=rng)},
    )


def same(found, expected, size=None):
    for i, length in enumerate(expected.length.tolist()):
        for name, each in expected.tokens.items():
            mine = found.tokens[name]
            assert torch.equal(mine[:, i, :length], each[:, i, :length]) and mine.dtype == each.dtype
            assert not mine[:, i, length:].any()
    assert torch.equal(found.fixed["pooled"], expected.fixed["pooled"])
    assert torch.equal(found.length, expected.length)
    assert size is None or found.tokens["key"].shape[2] == size


def test_records_make_the_batch_they_came_from():
    encoded = made()
    records = encoded.records(TAG)
    assert [record.length for record in records] == [3, 1, 2]
    assert records[1].bytes == 2 * 1 * 4 * 4 + 2 * 1 + 5 * 4
    same(features.batch(records, TAG), encoded, 3)
    same(features.batch(records, TAG, tokens=7), encoded, 7)


def test_records_do_not_share_memory_with_the_batch():
    encoded = made()
    record = encoded.records(TAG)[0]
    before = record.tokens["key"].clone()
    encoded.tokens["key"].zero_()
    assert torch.equal(record.tokens["key"], before) and before.any()


def test_valid_tokens_move_to_the_front_in_their_order():
    values = torch.arange(2 * 2 * 4 * 3).reshape(2, 2, 4, 3)
    valid = torch.tensor([[False, True, False, True], [True, True, False, False]])
    found = features.packed(values, valid)
    assert torch.equal(found[:, 0, :2], values[:, 0, [1, 3]])
    assert torch.equal(found[:, 1, :2], values[:, 1, [0, 1]])


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (Tag(model="m", backbone="c"), "of backbone b, but here it is c"),
        (Tag(model="n", backbone="b"), "of model m, but here it is n"),
        (Tag(model="m", backbone="b", augmentation="crop"), "of augmentation none, but here it is crop"),
    ],
)
def test_records_of_something_else_are_refused(other, words):
    with pytest.raises(ValueError, match=words):
        features.batch(made().records(TAG), other)


def test_what_makes_no_batch_is_refused():
    records, half = made().records(TAG), made().records(TAG)[0]
    half = features.Record(tokens={n: t.half() for n, t in half.tokens.items()}, fixed=half.fixed, tag=TAG)
    for call, words in (
        (lambda: features.batch([], TAG), "at least one record"),
        (lambda: features.batch(records, TAG, tokens=2), "3 tokens, more than the 2"),
        (lambda: features.batch([records[0], half], TAG), "records differ in their tokens"),
        (lambda: Features(tokens={}, length=torch.zeros(2), fixed={"a": torch.zeros(3)}), "one entry"),
        (lambda: Features(tokens={"a": torch.zeros(1, 3, 1)}, length=torch.zeros(2), fixed={}), "one B"),
    ):
        with pytest.raises(ValueError, match=words):
            call()


def weights():
    rng = torch.Generator().manual_seed(0)
    return {
        "a": torch.randn(7, 3, generator=rng).bfloat16(),
        "b": torch.randn(5, generator=rng),
        "c": torch.randn(3, generator=rng).bfloat16(),  # 6 bytes: no whole number of words
        "empty": torch.zeros(0),
        "step": torch.tensor(3),
    }


def changed(name, change):
    found = weights()
    found[name] = change(found[name])
    return found


def flipped(tensor, index, bit):
    found = tensor.clone()
    size = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    found.view(-1).view(size)[index] ^= 1 << bit
    return found


def test_every_bit_of_every_weight_is_in_the_digest():
    plain = digest(weights())
    assert plain == digest(dict(reversed(weights().items()))) and len(plain) == 16
    seen = {plain}
    for name, tensor in weights().items():
        for index in range(tensor.numel()):
            for bit in (0, 5, 8 * tensor.element_size() - 2):
                seen.add(digest(changed(name, lambda t, i=index, b=bit: flipped(t, i, b))))
    assert len(seen) == 1 + 3 * sum(t.numel() for t in weights().values())


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("a", lambda t: t[[1, 0, 2, 3, 4, 5, 6]]),
        ("a", lambda t: t.T.contiguous()),
        ("b", lambda t: t.flip(0)),
        ("b", lambda t: t.view(torch.int32)),
        ("empty", lambda t: torch.zeros(0, 2)),
    ],
    ids=["rows swapped", "transposed", "reversed", "other dtype", "other shape"],
)
def test_moved_numbers_change_the_digest(name, change):
    assert digest(changed(name, change)) != digest(weights())


def test_where_a_tensor_lies_does_not_change_the_digest():
    room = torch.zeros(22, dtype=torch.bfloat16)
    room[1:] = weights()["a"].flatten()
    odd = room[1:].view(7, 3)
    assert odd.data_ptr() % 4 == 2
    assert digest(changed("a", lambda _: odd)) == digest(weights())
    assert digest(changed("a", lambda t: t.T.contiguous().T)) == digest(weights())


def test_a_watch_notices_writes_and_thaws():
    held = {name: torch.nn.Parameter(torch.ones(2), requires_grad=False) for name in "abc"}
    watch = Watch(held)
    assert watch.changed() is None
    held["b"].requires_grad_(True)
    assert watch.changed() == "b"
    held["b"].requires_grad_(False)
    assert watch.changed() is None
    with torch.no_grad():
        held["c"].add_(1)
    assert watch.changed() == "c"
    watch = Watch(held)
    held["a"].data = torch.zeros(2)
    assert watch.changed() == "a"
