"""The traffic of training until its target is reached."""

from __future__ import annotations

from vflsec.core.federation import Federation
from vflsec.core.message import Kind

UPWARD = (Kind.EMBEDDING, Kind.CIPHERTEXT)


def traffic_so_far(federation: Federation, epochs: int) -> dict[str, float]:
    """Return the bytes sent until now: all of them, and as SS-VFL (section 5.1) counts them.

    The paper counts embeddings to the server alone, and has a server apart from all K parties, so that the active
    party's embeddings are sent as well.
    """
    trained = {
        route: n for route, n in federation.channel.traffic.items() if route.phase not in ("predict", "validate")
    }
    up = sum(n for route, n in trained.items() if route.kind in UPWARD and route.receiver == federation.active.name)
    parties = len(federation.parties)
    return {"epochs": epochs, "paper_bytes": up * parties / (parties - 1), "true_bytes": sum(trained.values())}
