"""launch.recovery=live: whoever sends nonsense to what a run listens on changes nothing."""

import random
import socket
import struct
import time
from contextlib import suppress

import psutil
from chaos import DIGITS, differences, final_state, undisturbed
from running import family, started, wait_for_steps, workers

CONFIG = DIGITS.replace("steps: 2000", "steps: 300")
HELLO = struct.pack("<BI", 0, 0x3C85F7CE)
"""What a client of torch's TCPStore says first."""
ATTEMPTS = 250


def listeners(process):
    """Addresses that the processes of a run listen on."""
    found = set()
    for each in family(process):
        with suppress(psutil.Error):
            found |= {tuple(c.laddr) for c in each.net_connections("inet") if c.status == psutil.CONN_LISTEN}
    return sorted(found)


def nonsense(chance):
    """Garbage, a part of what a client says, or all of it and then garbage."""
    garbage = chance.randbytes(chance.choice([0, 1, 3, 8, 64, 4096]))
    return chance.choice([garbage, HELLO[: chance.randrange(1, 5)], HELLO + garbage, b"GET / HTTP/1.1\r\n\r\n"])


def disturb(address, chance, kept):
    """Say nonsense; some connections stay open, some are reset."""
    with suppress(OSError):
        client = socket.create_connection(address[:2], timeout=1)
        client.sendall(nonsense(chance))
        if chance.random() < 0.3:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if chance.random() < 0.2:
            kept.append(client)
        else:
            client.close()


def test_nonsense_changes_nothing(tmp_path):
    reference, chance, kept, tried = undisturbed(tmp_path, CONFIG), random.Random(3), [], 0
    (tmp_path / "c.yaml").write_text(CONFIG)
    run = started(tmp_path, "train", "c.yaml", "launch.recovery=live", "launch.processes=3", "run.name=live")
    wait_for_steps(tmp_path / "runs" / "live", 1)
    while tried < ATTEMPTS and run.poll() is None:
        for address in listeners(run):
            disturb(address, chance, kept)
            tried += 1
        if tried % 10 == 0 and tried < ATTEMPTS / 2:  # also while they form anew
            with suppress(psutil.Error, IndexError):
                workers(run)[-1].kill()
        time.sleep(0.05)
    output, _ = run.communicate(timeout=90)
    for client in kept:
        client.close()
    assert run.returncode == 0 and tried >= ATTEMPTS, output
    assert differences(final_state(tmp_path / "runs" / "live"), reference) == []
