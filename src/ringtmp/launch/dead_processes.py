"""Which compute processes of a device are dead, and when it was once too often."""

from __future__ import annotations

from ringtmp.launch.agent_messages import Died
from ringtmp.launch.authenticate_devices import Device

#: A process that dies so often without a step between would go on dying: something on its device kills it.
MOST_DEATHS = 3


def dead(device: Device) -> bool:
    """Whether the process that died is the one that was started last; news of another may come late."""
    return device.died is not None and (device.started is None or device.died.generation == device.started.generation)


class Deaths:
    """Of one device's processes, without a step between them."""

    def __init__(self) -> None:
        self.count = 0
        self._step = -1
        self._last: Died | None = None

    def told_of(self, died: Died | None, step: int) -> bool:
        """True when it was once too often. The same death may be told of again."""
        if died is not self._last:
            self.count = self.count + 1 if step == self._step else 1
            self._last, self._step = died, step
        return self.count >= MOST_DEATHS
