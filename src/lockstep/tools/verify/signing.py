"""The signature of a run's hash chain, with an Ed25519 key in a PEM file."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lockstep.base import storage
from lockstep.base.errors import ConfigError, MissingExtra
from lockstep.checkpoint.layout import Link

FILE = "signature.json"
"""File in a run's folder."""


def sign(run: Path, key: Path, chain: Sequence[Link]) -> None:
    """Sign the last checkpoint, which stands for all before it. Raises ConfigError, MissingExtra."""
    signed = asdict(chain[-1])
    signature = read_key(key, "private").sign(_bytes(signed)).hex()
    storage.write(run / FILE, json.dumps({"signed": signed, "signature": signature}, indent=1))


def problem(run: Path, key: Path, chain: Sequence[Link]) -> str | None:
    """Return why the signature does not stand for this chain; None where it does. Raises ConfigError, MissingExtra."""
    public = read_key(key, "public")
    try:
        found = storage.read_json(run / FILE)
        public.verify(bytes.fromhex(found["signature"]), _bytes(found["signed"]))
        if found["signed"] not in map(asdict, chain):
            return f"{FILE} is of another hash chain than the run's"
        if (last := found["signed"]["step"]) != chain[-1].step:
            return f"the checkpoints after step {last} are not signed: sign the run again"
        return None
    except FileNotFoundError:
        return f"there is no {FILE} in {run}: sign the run with --sign KEY"
    except Exception as error:  # an InvalidSignature, or a file of any other form
        return f"{FILE} was not made with the key of {key}, or has been changed ({type(error).__name__})"


def _bytes(signed: Any) -> bytes:
    return json.dumps(signed, sort_keys=True).encode()


def read_key(file: Path, kind: str) -> Any:
    """Read a private or public key. Raises ConfigError, MissingExtra."""
    try:
        from cryptography.hazmat.primitives import serialization  # noqa: PLC0415 (an extra)
    except ImportError:
        raise MissingExtra("signatures need the package cryptography: pip install 'lockstep-train[sign]'") from None
    try:
        pem = storage.read_regular(file, 1 << 16)
        key: Any = getattr(serialization, f"load_pem_{kind}_key")(pem, *[None] * (kind == "private"))
    except (OSError, ValueError, TypeError) as error:
        key = str(error).partition("\n")[0]
    if f"Ed25519{kind.title()}Key" not in type(key).__name__:
        what = key if isinstance(key, str) else "it is of another algorithm"
        advice = "openssl genpkey -algorithm ed25519 -out KEY; openssl pkey -in KEY -pubout -out PUBLIC_KEY"
        raise ConfigError(f"{file} is no {kind} Ed25519 key in PEM without a password ({what}): {advice}")
    return key
