"""Gloo authenticates nobody: the processes of a group prove to each other that they know the run's secret, each two of
them over the connection that they use from then on (a challenge, and its HMAC-SHA256)."""

import hmac
import secrets
from collections.abc import Mapping

import torch
import torch.distributed as dist

from lockstep.base.errors import PeerLost

BYTES = 32


def authenticate(group: dist.ProcessGroup, secret: bytes) -> None:
    """Collective. Raises PeerLost where another process does not know the secret."""
    rank = dist.get_rank()
    others = [other for other in dist.get_process_group_ranks(group) if other != rank]
    challenges = {other: secrets.token_bytes(BYTES) for other in others}
    asked = _exchanged(challenges, group)
    answers = _exchanged({other: _proof(secret, asked[other], ranks=(rank, other)) for other in others}, group)
    for other in others:
        if not hmac.compare_digest(answers[other], _proof(secret, challenges[other], ranks=(other, rank))):
            raise PeerLost(f"what has connected as rank {other} does not know the run's secret")


def _proof(secret: bytes, challenge: bytes, *, ranks: tuple[int, int]) -> bytes:
    """Of the first rank for the second, so that nobody in between can pass it on as an answer to a third."""
    return hmac.digest(secret, b"%d %d " % ranks + challenge, "sha256")


def _exchanged(messages: Mapping[int, bytes], group: dist.ProcessGroup) -> dict[int, bytes]:
    """Send each rank its message -> those of the others."""
    received = {other: torch.empty(BYTES, dtype=torch.uint8) for other in messages}
    sent = {other: torch.frombuffer(bytearray(message), dtype=torch.uint8) for other, message in messages.items()}
    works = [dist.isend(tensor, other, group=group) for other, tensor in sent.items()]
    works += [dist.irecv(tensor, other, group=group) for other, tensor in received.items()]
    for work in works:
        assert work is not None  # this rank is in the group
        work.wait()
    return {other: bytes(tensor.tolist()) for other, tensor in received.items()}
