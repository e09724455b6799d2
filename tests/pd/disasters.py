"""What goes wrong in a schedule beyond its messages: engines that die, ranks that are replaced, leases that are lost."""

from __future__ import annotations

from hisparse.engine.load_failures import LoadFailurePolicy
from tests.pd.prefill import Prefill
from tests.pd.requests import LIVE, State
from tests.pd.world_part import WorldPart

MAX_LIVE = 8


class Disasters(WorldPart):
    """Part of `World`."""

    def kill(self, prefill: Prefill) -> bool:
        """A prefill engine is gone; sometimes its memory can still be read."""
        if prefill.alive:
            linger = self.rng.random() < 0.4
            self.met["prefill cut off" if linger else "prefill killed"] += 1
            prefill.ranks_die(linger=linger)
            prefill.alive = False
            return True
        return False

    def restart(self, prefill: Prefill) -> None:
        """It comes back on the same address, as another incarnation."""
        self.kill(prefill)
        self.met["prefill restarted"] += 1
        prefill.start()

    def restart_prefill_ranks(self, prefill: Prefill) -> bool:
        """Its ranks only: the engine knows its prompts, but every page is lost."""
        if prefill.alive:
            self.met["prefill ranks restarted"] += 1
            prefill.replace_ranks()
            return True
        return False

    def lose_lease(self, prefill: Prefill) -> bool:
        """Prefill lets go of pages and uses them at once: of some that are being read, seldom of others."""
        read = [r for r in self.of(State.IMPORTING) if r.prefill_id in r.prefill.leased and self.decode.reads(r.request_id)]
        victim = self.rng.choice(read) if read else None
        prefill = victim.prefill if victim is not None else prefill
        if not (prefill.alive and prefill.leased and (read or self.rng.random() < 0.15)):
            return False
        self.met["lease lost while it was read" if read else "lease lost"] += 1
        prefill.pd.release_request(victim.prefill_id if victim is not None else self.rng.choice(list(prefill.leased)))
        prefill.collect(next_out=True)
        if not prefill.queue and len(self.of(*LIVE)) < MAX_LIVE:
            self.arrive(prefill)
        if prefill.begin():
            prefill.write(self.rng.choice((4, 100, 1000)), prefill.jobs[-1])
        return True

    def block(self, rank: int) -> bool:
        """A call of the transport does not come back, for some seconds or until the schedule settles."""
        decode = self.decode
        if decode.blocked(rank):
            return False
        self.met["transport call blocks"] += 1
        decode.blocked_until_s[rank] = self.rng.choice((decode.clock() + 1.0, decode.clock() + 4.0, float("inf")))
        return True

    def restart_decode(self) -> None:
        """All of it: clients see their connection end."""
        self.met["decode restarted"] += 1
        for request in self.of(*LIVE):
            request.state, request.error, request.pages = State.ERROR, "decode restarted", None
        self.zombies.clear()
        self.failures = LoadFailurePolicy(self.decode.config)
        self.incarnations.clear()
        self.retired.clear()
        self.decode.ranks_die()
        self.decode.start()

    def restart_ranks(self) -> None:
        """Its ranks only: what they held is lost, what they still had to say comes late."""
        self.met["decode ranks restarted"] += 1
        decode = self.decode
        old = decode.outputs
        decode.ranks_die()
        decode.ranks_start()
        decode.pd.workers_restarted(decode.incarnation, decode.endpoints)
        for mail, late in zip(decode.outputs, old, strict=True):
            mail.extend(late)
        for request in self.of(State.LOADED):
            request.pages = None
            self.fall_back(request, "the ranks restarted")
        lost = {request.request_id for request in self.of(State.IMPORTING)}
        for request_id in lost:
            self.requests[request_id].pages = None
        events = decode.pd.update([])
        assert set(events.failed) >= lost and not set(events.loaded), "an import outlives its ranks"
        for request_id, why in events.failed.items():
            self.fall_back(self.requests[request_id], why)
        for request_id in events.drained:
            del self.zombies[request_id]
        assert not self.zombies
