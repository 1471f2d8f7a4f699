"""Tensor parallelism: every layer is cut inside over the workers, which compute parts of every sample together.

A. Coates, B. Huval, T. Wang, D. J. Wu, A. Y. Ng, B. Catanzaro, Deep Learning with COTS HPC Systems, ICML 2013 (distributed
arrays); M. Shoeybi, M. Patwary, R. Puri, P. LeGresley, J. Casper, B. Catanzaro, Megatron-LM, 2019 (columns, then rows; heads).
The role is in member.py, the exchanges in local_program.py, what becomes of each operator in cutting.py.

    symbol            here
    Y = f(X A) B      two linear layers; A is cut by columns, B by rows, and X and Y are whole on every worker
    f, g              the exchanges `copy` and `sum`
    n                 the number of workers, the master among them
    least             the setting: weights with fewer values stay whole on every worker

Same result as one process, up to the rounding of sums over workers; dropout draws the same numbers. Every worker has every
sample and every label. What is not cut (embeddings, norms, small weights) is whole on every worker, gets the same gradient
there and stays the same.

Departures. Where to cut is found in the graph of any model, not written into it: after columns everything that computes value
by value, head by head or channel by channel stays cut, until rows or an operator that needs the whole. Embeddings are not cut.
COTS HPC cuts convolutions by places of the picture; here they are cut by channels. The bias of rows is added after the sum.

Lost worker: nobody else has its part. Everyone goes back to the newest checkpoint, with a replacement; fewer workers must
divide the model too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec

from ringtmp.errors import ProtocolError
from ringtmp.strategies.base import (
    About,
    OnPaper,
    Plan,
    PlanRequest,
    Roles,
    Runs,
    Settings,
    Sizes,
    Strategy,
    Task,
    Traffic,
    described,
)
from ringtmp.strategies.data_parallel.checked_settings import refuse_rounding, refuse_too_short

if TYPE_CHECKING:
    from ringtmp.runtime.mailbox import Endpoint
    from ringtmp.strategies.tensor.member import TensorMember
    from ringtmp.wire.messages import Message


class TensorSettings(Settings, frozen=True):
    least: Annotated[int, described(
        "1 or more", "weights with fewer values than this are not cut: every worker has them whole")] = 1024  # fmt: skip

    def __post_init__(self) -> None:
        refuse_too_short("least", self.least)

    def check(self, nodes: int, wire: str) -> None:
        refuse_rounding("tensor", wire)


class Tensor(Strategy):
    name = "tensor"
    about = About(
        "Tensor parallelism: linear layers, attention and convolutions are cut inside",
        "model", "centralised, each part where it lies", "synchronous", "parts of activations and their gradients, summed",
        "ring of workers", "Coates et al. 2013; Shoeybi et al. 2019",
    )  # fmt: skip
    runs = (Runs("COTS HPC", "tensor", lacks="convolutions cut by places of the picture"),)
    Settings = TensorSettings
    shares_batches = False
    short = "least"
    short_number = "4096 for weights with fewer values to stay whole"

    def plan(self, request: PlanRequest) -> Plan:
        from ringtmp.strategies.tensor.plan import plan

        return plan(request, self, self.read(request.config.ring.strategy_settings).least)

    def member(self, endpoint: Endpoint, message: Message) -> TensorMember | None:
        from ringtmp.strategies.tensor.member import TensorMember
        from ringtmp.strategies.tensor.told import Told
        from ringtmp.wire.messages import Enlist

        if not isinstance(message, Enlist) or message.strategy != self.name:
            return None
        try:
            told = msgspec.convert(message.settings, Told)
        except msgspec.ValidationError as error:
            raise ProtocolError(f"sent a plan of strategy tensor that cannot be read: {error}") from error
        return TensorMember(endpoint, message, told, self.roles(None, message.nodes))

    def simulate(self, settings: TensorSettings, task: Task) -> OnPaper:
        from ringtmp.strategies.tensor.simulate_parts import simulate_parts

        return simulate_parts(task)

    def traffic(self, settings: TensorSettings, sizes: Sizes, nodes: int) -> Traffic:
        """Every value that is added up over workers goes 2 (n - 1) / n times through each; once forward, or once backward."""
        total = 2 * (nodes - 1) * sizes.inside * sizes.samples
        return Traffic(total, total / nodes)

    def roles(self, settings: TensorSettings | None, nodes: int) -> Roles:
        return Roles((), tuple(range(nodes)))


STRATEGY = Tensor()
