"""Sharing batches; the rest of data-parallel training is in test_loop.py, under torchrun."""

import pytest
import torch

from primal.training import distributed


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_shares_make_up_the_batch(monkeypatch, world, size):
    batch = torch.arange(10, 10 + size)
    monkeypatch.setattr(distributed, "size", lambda: world)
    counted = torch.zeros(20)
    for rank in range(world):
        monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
        mine, weight = distributed.share(batch)
        assert len(mine) >= 1  # all processes keep step
        counted.index_add_(0, mine, torch.full((len(mine),), weight))
    expected = torch.zeros(20)
    expected[batch] = 1 / size
    torch.testing.assert_close(counted, expected)


def test_one_process_writes_and_shares_with_nobody():
    tensor = torch.ones(2)
    distributed.add_up([tensor])
    distributed.copy_first([tensor])
    assert tensor.tolist() == [1, 1]
    assert distributed.is_first()
    assert distributed.any_of(True, False) == (True, False)


def test_what_the_first_process_cannot_do_is_raised():
    def refuse() -> None:
        raise ValueError("no room")

    with pytest.raises(ValueError, match="no room"):
        distributed.by_first(refuse)


def test_without_torchrun_there_is_one_process(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with distributed.world(torch.device("cpu")):
        assert (distributed.size(), distributed.rank()) == (1, 0)


def test_before_processes_are_joined_torchrun_tells_which_is_first(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert not distributed.is_first()
