"""Which replica gets a request: the one that has read the beginning of its prompt, if it has time.

Ray Serve asks this router in the process that sends the requests. A replica has read what was sent
to it, so the router remembers by its digests where each beginning went (beginnings.py).
"""

import random
import time
from collections import Counter, OrderedDict, deque
from typing import Any

from ray.serve.request_router import (
    PendingRequest,
    ReplicaID,
    ReplicaResult,
    RequestRouter,
    RunningReplica,
)

from .beginnings import Beginning

KNOWN = 2**17  # beginnings that are remembered, about 200 bytes each
PROMISE_SECONDS = 1.0  # in which a request is sent to the replica chosen for it, or never
LEAST_SHARE = 0.5  # of a prompt: reading less than this again is faster than waiting


class PrefixRouter(RequestRouter):
    """Sends a prompt where most of its beginning was read, or to the replica with least to do."""

    def initialize_state(self, **options: Any) -> None:
        """Takes `slots`, the sequences that a replica decodes together. With so many requests it is
        full: a request whose prompt it has read goes to another replica."""
        self.slots: int = options["slots"]
        self.places: OrderedDict[bytes, set[ReplicaID]] = OrderedDict()  # the newest last
        self.unfinished = Counter[ReplicaID]()  # requests that were sent
        self.promised: dict[ReplicaID, deque[float]] = {}  # when requests not yet sent chose it

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:  # fmt: skip
        """Returns the replicas to try, the best first; Ray takes the least loaded of a group."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # if all of them are full
        everyone = random.sample(candidate_replicas, len(candidate_replicas))
        readers = self.readers(beginnings_of(pending_request))
        loads = {one.replica_id: self.load(one) for one in everyone}
        free = [one for one in everyone if loads[one.replica_id] < self.slots]
        preferred = [one for one in free if one.replica_id in readers] or everyone
        if not preferred:
            return []
        best = min(preferred, key=lambda one: loads[one.replica_id])
        self.promised.setdefault(best.replica_id, deque()).append(time.monotonic())
        return [[best], everyone]

    def readers(self, beginnings: list[Beginning]) -> set[ReplicaID]:
        """Returns the replicas that have read the longest beginning that any of them has."""
        for digest, share in reversed(beginnings):
            if share < LEAST_SHARE:
                break
            alive = self.places.get(digest, set()) & self.curr_replicas.keys()
            if alive:
                return alive
        return set()

    def load(self, replica: RunningReplica) -> int:
        """Returns how many requests a replica has, with those that are about to be sent to it.

        Ray's own count is not used: a replica's reply sets it to the number when that reply was
        made, without the requests sent since, and it is forgotten after ten seconds."""
        promised = self.promised.get(replica.replica_id, deque())
        while promised and promised[0] < time.monotonic() - PROMISE_SECONDS:
            promised.popleft()  # another took it, or its client has gone
        return self.unfinished[replica.replica_id] + len(promised)

    def on_send_request(self, replica_id: ReplicaID) -> None:
        """Counts a request as the replica's, and as promised no more."""
        super().on_send_request(replica_id)
        self.unfinished[replica_id] += 1
        if self.promised.get(replica_id):
            self.promised[replica_id].popleft()

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Counts a request as the replica's no more: it was answered, refused or cancelled."""
        super().on_request_completed(replica_id, internal_request_id)
        self.unfinished[replica_id] = max(self.unfinished[replica_id] - 1, 0)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Takes the replicas that there are now."""
        super().update_replicas(replicas)
        for known in (self.promised, self.unfinished):
            for one in known.keys() - self.curr_replicas.keys():
                del known[one]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult
    ) -> None:
        """Remembers what the replica reads."""
        for digest, _ in beginnings_of(pending_request):
            known = self.places.pop(digest, set()) & self.curr_replicas.keys()
            self.places[digest] = {*known, replica_id}
        while len(self.places) > KNOWN:
            self.places.popitem(last=False)


def beginnings_of(pending_request: PendingRequest | None) -> list[Beginning]:
    return [] if pending_request is None else pending_request.kwargs.get("beginnings", [])
