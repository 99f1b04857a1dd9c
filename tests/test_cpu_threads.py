"""One thread inside, the caller's own number of threads afterwards."""

import pytest
import torch

from somaspeed_patch.cpu_threads import one_thread


@pytest.fixture
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("three_threads")
def test_the_number_comes_back_also_after_an_error():
    with one_thread():
        assert torch.get_num_threads() == 1
        with one_thread():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 3
    with pytest.raises(KeyError), one_thread():
        raise KeyError
    assert torch.get_num_threads() == 3


@pytest.mark.usefixtures("three_threads")
def test_a_decorated_function_can_be_called_again():
    counted = one_thread()(torch.get_num_threads)
    assert [counted(), counted(), torch.get_num_threads()] == [1, 1, 3]
