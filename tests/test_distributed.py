"""Two processes under DistributedDataParallel train as one process does on the whole batch."""

import os
import subprocess
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from primal.losses import with_ksvd
from primal.models.build import EncoderConfig, build_encoder

WORLD, STEPS, SECONDS = 2, 3, 100

PLUS = EncoderConfig(width=12, heads=2, rank=3, primal_layers=(-1,), dropout=0.0)
CONFIGS = {
    "plus": PLUS,
    "left": replace(PLUS, scores="left", norm="post"),
    "contextual": replace(PLUS, projection="contextual", feature_map="elu", short_convolution=3),
    "causal": replace(PLUS, causal=True, primal_layers="all"),
}


def train(config: EncoderConfig, rank: int, world: int) -> dict[str, Tensor]:
    """Train on this rank's share of a batch; return the parameters and the gradients."""
    torch.manual_seed(0)
    x, lengths = torch.randn(STEPS, 4, 6, 12, dtype=torch.float64), torch.tensor([6, 1, 3, 4])
    encoder = build_encoder(config).double()
    model: nn.Module = encoder if world == 1 else DistributedDataParallel(encoder)
    optimiser = torch.optim.Adam(encoder.parameters(), lr=0.01)
    for tokens in x:
        values, terms = model(tokens[rank::world], mask=lengths[rank::world])
        loss = with_ksvd(values.sin().sum((1, 2)).mean(), terms, weight=0.3)
        optimiser.zero_grad()
        loss.total.backward()
        optimiser.step()
    gradients = {f"{k}.grad": p.grad for k, p in encoder.named_parameters() if p.grad is not None}
    return encoder.state_dict() | gradients


def main(rank: int, folder: Path) -> None:
    """Be one of the processes."""
    torch.set_num_threads(1)
    limit = timedelta(seconds=SECONDS)
    where = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", where, limit, world_size=WORLD, rank=rank)
    try:
        trained = {name: train(config, rank, WORLD) for name, config in CONFIGS.items()}
    finally:
        dist.destroy_process_group()
    torch.save(trained, folder / f"{rank}.pt")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Tensor]]]:
    """Return what each process ends with."""
    folder = tmp_path_factory.mktemp("distributed")
    root = str(Path(__file__).parents[1])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), str(folder)],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(WORLD)
    ]
    try:
        for process in processes:
            _, errors = process.communicate(timeout=SECONDS)
            assert process.returncode == 0, errors
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    return [torch.load(folder / f"{rank}.pt") for rank in range(WORLD)]


@pytest.mark.parametrize("name", CONFIGS)
def test_two_processes_train_as_one(trained, name):
    alone = train(CONFIGS[name], rank=0, world=1)
    parameters = dict(build_encoder(CONFIGS[name]).named_parameters())
    assert {f"{key}.grad" for key in parameters} <= alone.keys()  # none is left unused
    for of_rank in trained:
        torch.testing.assert_close(of_rank[name], alone, rtol=0, atol=1e-9)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
