"""What servers make of coarse gradients is what a plain loop makes of them: every worker's remainders by key, the sum in the
order of workers, one update, and the change that all workers get, whose remainder goes into the next."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

from ringtmp.launch.ring_in_one_process import InMemoryPool
from ringtmp.strategies.data_parallel import parameter_keys
from ringtmp.strategies.ps.client import Client
from ringtmp.wire.formats import ErrorFeedback, wire_format
from test_strategies import Case, latest_flat, layers, sizes, train

RATE, STEPS = 0.5, 20


@pytest.mark.parametrize(("wire", "servers"), [("topk", "workers"), pytest.param("1bit", 2, marks=pytest.mark.long)])
def test_servers_make_of_coarse_gradients_what_a_plain_loop_makes(
    wire: str, servers: str | int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pushed: dict[tuple[int, int], dict[int, torch.Tensor]] = defaultdict(dict)
    read: dict[tuple[int, int], list[torch.Tensor]] = defaultdict(list)
    hand_over = Client.gradient

    def gradient(client: Client, layer: int, step: int, share: float, found: torch.Tensor) -> None:
        pushed[step, layer][client.endpoint.node] = found.clone()
        read[step, layer].append(client._replica.values[layer].clone())
        hand_over(client, layer, step, share, found)

    monkeypatch.setattr(Client, "gradient", gradient)
    case, pool = Case("ps", 4, {"servers": servers}, wire), InMemoryPool(4, seed=3)
    result = train(case, tmp_path, pool=pool, optimizer="sgd", optimizer_settings={"lr": RATE}, steps=STEPS)
    table = parameter_keys.cut(sizes(result), 4 if servers == "workers" else int(servers))
    expected = plain_loop(wire, table, pushed, read)
    for layer, got in enumerate(latest_flat(result)):
        cut = [expected[key.number] for key in table if key.layer == layer]
        slots = parameter_keys.flat(
            [(each.name, each.shape) for each in layers(result)[layer].tensors if each.trainable]
        ).slots  # what lies between tensors is in no checkpoint
        for each in slots:
            assert torch.equal(got[each.start : each.stop], torch.cat(cut)[each.start : each.stop]), (layer, each.name)


def plain_loop(wire: str, table: Any, pushed: Any, read: Any) -> dict[int, torch.Tensor]:
    """The weights on the servers; on the way what every worker computed with is compared."""
    form = wire_format(wire)
    remainders: dict[int, ErrorFeedback] = defaultdict(lambda: ErrorFeedback(form))
    values: dict[int, torch.Tensor] = {}
    known: dict[int, torch.Tensor] = {}
    for step in range(STEPS):
        for key in table:
            place = slice(key.start, key.stop)
            if not step:
                values[key.number] = read[0, key.layer][0][place].clone()
                known[key.number] = values[key.number].clone()
            for has in read[step, key.layer]:
                assert torch.equal(has[place], known[key.number]), (step, key)
            found = pushed[step, key.layer]
            arrived = [
                form.decode(remainders[each].encode(key.number, found[each][place]), key.size) for each in sorted(found)
            ]
            total = arrived[0]
            for each in arrived[1:]:
                total = total + each
            values[key.number] = values[key.number] - RATE * total
            change = form.encode(values[key.number] - known[key.number])
            known[key.number] = known[key.number] + form.decode(change, key.size)
    return values
