"""Facts ride on a tensor, through a move, through a worker's pickle, and are gone when its values change."""

import io
import pickle

import pytest
import torch

from somaspeed_patch import facts


def test_a_fact_belongs_to_the_values():
    mask = torch.ones(2, 3, dtype=torch.bool)
    facts.attach(mask, "longest", 3)
    facts.attach(mask, "every", True)
    assert (facts.get(mask, "longest"), facts.get(mask, "every")) == (3, True)
    mask[0, 2] = False
    assert facts.get(mask, "longest") is None
    facts.attach(mask, "every", False)
    assert facts.get(mask, "every") is False and facts.get(mask, "longest") is None


def test_a_moved_tensor_keeps_facts_and_a_twin():
    ids = torch.arange(6).reshape(2, 3)
    facts.attach(ids, "longest", 3)
    there = torch.empty(2, 3, dtype=torch.long, device="meta")
    facts.moved(ids, there)
    assert facts.get(there, "longest") == 3
    assert facts.has_twin(there) and facts.on_cpu(there) is ids
    assert facts.on_cpu(ids) is ids


def test_floats_bytes_and_large_tensors_have_no_twin():
    large = torch.zeros(facts.LARGEST_TWIN // 8 + 1, dtype=torch.long)
    for tensor in (torch.zeros(3), torch.zeros(3, dtype=torch.uint8), large):
        there = torch.empty_like(tensor, device="meta")
        facts.moved(tensor, there)
        assert not facts.has_twin(there)


def test_tensors_of_inference_mode_keep_facts():
    """LeRobot preprocesses observations there; such tensors do not count what is written into them."""
    with torch.inference_mode():
        ids = torch.arange(6)
        facts.attach(ids, "longest", 3)
        there = torch.empty(6, dtype=torch.long, device="meta")
        facts.moved(ids, there)
    assert facts.get(there, "longest") == 3 and facts.on_cpu(there) is ids
    assert facts.get(torch.arange(6), "longest") is None


def test_a_batch_goes_through_a_pickle():
    batch = {"ids": torch.tensor([[1, 2], [3, 4]]), "pixels": torch.ones(2, 2), "task": ["a", "b"]}
    facts.attach(batch["pixels"], "range", (0, 1))
    facts.pack(batch)
    arrived = pickle.load(io.BytesIO(pickle.dumps(batch)))
    arrived["ids"] = torch.empty(2, 2, dtype=torch.long, device="meta")  # the trainer has moved it
    facts.unpack(arrived)
    assert facts.BATCH_KEY not in arrived and arrived["task"] == ["a", "b"]
    assert torch.equal(facts.on_cpu(arrived["ids"]), torch.tensor([[1, 2], [3, 4]]))
    assert facts.get(arrived["pixels"], "range") == (0, 1)


def test_a_batch_without_facts_is_left_as_it_is():
    batch = {"ids": torch.ones(2), facts.BATCH_KEY: "somebody else's"}
    facts.unpack(batch)
    assert batch[facts.BATCH_KEY] == "somebody else's" and set(batch) == {"ids", facts.BATCH_KEY}


@pytest.mark.gpu
def test_values_are_fetched_once_until_they_change():
    there = torch.arange(6, device="cuda")
    first = facts.on_cpu(there)
    assert facts.on_cpu(there) is first and torch.equal(first, torch.arange(6))
    there += 1
    assert torch.equal(facts.on_cpu(there), torch.arange(6) + 1)
